"""Dense and block-sparse attention: cases, the libraries beside tilefold, running them, tables."""
