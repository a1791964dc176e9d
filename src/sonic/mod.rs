//! The method: eight kernels that keep x and h only, on the CPU and on Hopper GPUs.
//!
//! | # | kernel | file |
//! | --- | --- | --- |
//! | 1 | up forward (A) | `up_forward` |
//! | 2 | down forward (Y) | `down_forward` |
//! | 3 | combine (O) | `combine_output` |
//! | 4 | down backward, activation (dH) | `down_backward_activation` |
//! | 5 | down backward, weight (dW2) | `down_backward_weight` |
//! | 6 | up backward, activation (dX̃) | `up_backward_activation` |
//! | 7 | up backward, weight (dW1) | `up_backward_weight` |
//! | 8 | combine (dX) | `combine_input_gradient` |
//! |   | db1 and db2 | `up_bias_gradient`, `down_bias_gradient` |

pub mod cpu;
pub mod gpu;
