//! The command line says what it found, with the right exit code.
