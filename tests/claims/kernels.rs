//! The eight kernels on the CPU: rounding points, threads, memory, empty experts.
