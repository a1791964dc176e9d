//! The same eight launches on a Hopper GPU.
