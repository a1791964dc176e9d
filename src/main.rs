//! The `sonicmoe` command.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use sonicmoe::cli::{doctor, memory, verify};
use sonicmoe::oracle::Verdict;

#[derive(Parser)]
#[command(version, about)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Verify(verify::VerifyArgs),
    Memory(memory::MemoryArgs),
    /// Says what this machine allows: driver, device, NVRTC, cuBLAS
    Doctor(doctor::Doctor),
}

fn main() -> ExitCode {
    let verdict = match Arguments::parse().command {
        Command::Verify(args) => verify::verify(&args),
        Command::Memory(args) => {
            print!("{}", memory::memory(&args));
            Ok(Verdict::Pass)
        }
        Command::Doctor(args) => args.run(&mut std::io::stdout()).map(|()| Verdict::Pass),
    };
    match verdict {
        Ok(verdict) => verdict.into(),
        Err(error) => {
            eprintln!("error: {error}");
            Verdict::from(&error).into()
        }
    }
}
