//! Runs of foreign implementations as safetensors files.
