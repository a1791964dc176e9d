//! The command line.

pub mod bench;
pub mod check;
pub mod compare;
mod console;
pub mod conventions;
pub mod doctor;
pub mod dumper;
pub mod explain;
pub mod generate;
pub mod identify;
pub mod memory;
pub mod replay;
pub mod score;
pub mod tune;
pub mod verify;

pub use console::{Console, Progress};

use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::error::{Error, Result};
use crate::oracle::Verdict;

/// SonicMoE: mixture-of-experts training with little activation memory, and the proof that an
/// implementation of it is right.
#[derive(Parser, Debug)]
#[command(name = "sonicmoe", version, after_help = AFTER_HELP, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const AFTER_HELP: &str = "\
Examples:
  sonicmoe verify                                 does SonicMoE compute what plain autograd computes?
  sonicmoe check run.safetensors                  is this run of somebody's MoE layer right?
  sonicmoe explain run.safetensors                which known bug makes it wrong?
  sonicmoe compare before.safetensors after.safetensors    do two runs give the same?
  sonicmoe gen --shape 256,128,64,8,2 run.safetensors   inputs, to run one's own layer on
  sonicmoe identify run.safetensors               which conventions explain this run?
  sonicmoe memory --shape 24576,1536,256,128,8    what does a layer keep for its backward?
  sonicmoe score                                  which check catches which planted bug?
  sonicmoe bench                                  how fast is the layer on this machine's CPU?
  sonicmoe tune                                   which settings make a GPU's kernels fast?
  sonicmoe doctor                                 what can this machine run?

Exit codes: 0 pass, 1 a number is wrong, 2 bad input, 3 a check could not have failed, 4 something
required is missing, 5 a fault of this program. The worst by the order 5, 2, 1, 3, 4, 0 wins.";

#[derive(Subcommand, Debug)]
enum Command {
    Verify(verify::VerifyArgs),
    Check(check::CheckArgs),
    Compare(compare::CompareArgs),
    Gen(generate::GenArgs),
    Identify(identify::IdentifyArgs),
    Memory(memory::MemoryArgs),
    Explain(explain::ExplainArgs),
    Score(score::ScoreArgs),
    Replay(replay::ReplayArgs),
    Shrink(replay::ShrinkArgs),
    Bench(bench::BenchArgs),
    Tune(tune::TuneArgs),
    Dumper(dumper::DumperArgs),
    /// Says what this machine allows: driver, device, NVRTC, cuBLAS
    Doctor(doctor::Doctor),
    /// Fails as a fault of this program would, so that scripts can be tried on exit code 5
    #[command(hide = true)]
    BrokenPromise,
}

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    std::panic::set_hook(Box::new(|panic| {
        complain(&format!("sonicmoe: internal error, please report it: {}", one_line(&panic.to_string())));
    }));
    guarded(|| {
        // Wrong usage ends here with exit code 2, `--help` with 0.
        let cli = Cli::parse();
        run(&cli.command, &Console::of_process(), &mut Standard)
    })
    .into()
}

fn run(command: &Command, console: &Console, out: &mut dyn Write) -> Verdict {
    let verdict = match command {
        Command::Verify(args) => verify::verify(args, out),
        Command::Check(args) => check::check(args, console, out),
        Command::Compare(args) => compare::compare(args, console, out),
        Command::Gen(args) => generate::generate(args, out).map(|()| Verdict::Pass),
        Command::Identify(args) => identify::identify(args, console, out),
        Command::Replay(args) => replay::replay(args, console, out),
        Command::Shrink(args) => replay::shrink(args, console, out),
        Command::Memory(args) => written(out.write_all(memory::memory(args).as_bytes())).map(|()| Verdict::Pass),
        Command::Explain(args) => explain::run(args, out),
        Command::Score(args) => score::run(args, out),
        Command::Bench(args) => {
            bench::bench(args).and_then(|text| written(out.write_all(text.as_bytes()))).map(|()| Verdict::Pass)
        }
        Command::Tune(args) => {
            tune::tune(args).and_then(|text| written(out.write_all(text.as_bytes()))).map(|()| Verdict::Pass)
        }
        Command::Dumper(args) => written(out.write_all(dumper::dumper(args).as_bytes())).map(|()| Verdict::Pass),
        Command::Doctor(args) => args.run(out).map(|()| Verdict::Pass),
        Command::BrokenPromise => panic!("as asked for"),
    };
    verdict.unwrap_or_else(|error| {
        complain(&format!("error: {}", one_line(&error.to_string())));
        Verdict::from(&error)
    })
}

/// A line on standard error. Where nobody can read it, the exit code still says what it is.
fn complain(message: &str) {
    let _ = writeln!(std::io::stderr(), "{message}");
}

/// A report that cannot be written is an error like any other.
fn written(result: std::io::Result<()>) -> Result<()> {
    result.map_err(|source| Error::io("standard output", source))
}

/// Standard output that a reader may close early, as `head` does: what nobody reads is dropped, and
/// the verdict stays what it is.
struct Standard;

impl Write for Standard {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        match std::io::stdout().write(bytes) {
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(bytes.len()),
            result => result,
        }
    }

    fn flush(&mut self) -> std::io::Result<()> {
        match std::io::stdout().flush() {
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
            result => result,
        }
    }
}

/// A panic is a fault of this program, whatever it was asked.
fn guarded(work: impl FnOnce() -> Verdict) -> Verdict {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or(Verdict::InternalError)
}

fn one_line(text: &str) -> String {
    text.lines().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn a_panic_becomes_an_internal_error() {
        assert_eq!(guarded(|| panic!("a promise was broken")), Verdict::InternalError);
        assert_eq!(guarded(|| Verdict::Pass), Verdict::Pass);
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
