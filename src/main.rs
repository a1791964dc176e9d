//! The `sonicmoe` command; see [`sonicmoe::cli`].

use std::process::ExitCode;

fn main() -> ExitCode {
    sonicmoe::cli::main()
}
