//! Standard autograd: a tape over `ndarray`, and the plain MoE layer on it.
