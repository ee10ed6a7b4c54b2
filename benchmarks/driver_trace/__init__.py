"""Which calls of the CUDA driver another thread's launches wait for, and where a load's CPU time goes (a GPU is needed)."""
