//! Real dumps pass, wrong copies of them fail, malformed files are refused.
