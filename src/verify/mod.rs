//! The campaign: random problems through both paths, judged by every oracle.
