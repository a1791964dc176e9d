//! The eight kernels and the two bias kernels on the CPU.
