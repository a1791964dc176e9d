//! What judges an engine. No oracle imports one.
