"""Host side of the kernels: check, plan, allocate, launch.  The only place that launches anything."""
