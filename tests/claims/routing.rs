//! Choice of experts, scores, metadata and certificates.
