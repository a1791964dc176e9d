//! Central differences confirm the reference: every activation, every router convention.
