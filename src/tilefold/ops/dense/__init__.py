"""Dense attention forward: checked, bound to kernels, launched, told to torch's dispatcher."""
