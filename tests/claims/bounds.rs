//! Bounds hold for correct engines and fail for faults.
