//! Every kernel compiles for Hopper into the machine code that it was written for: no spill, no local
//! memory, no serialised tensor core work, and tensor cores in every main loop.
//!
//! Needs CUDA's compiler and no GPU. A machine without it skips these tests by name.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use rayon::prelude::*;

use sonicmoe::Activation;
use sonicmoe::sonic::gpu::compile::{Compiled, Compiler, CubinCache, Found, KernelName, Variant};

/// CUDA's command-line tools and the folder of NVRTC.
struct Tools {
    programs: PathBuf,
    compiler: Compiler,
}

impl Tools {
    /// In `.cuda`, a virtual environment beside the manifest, or on the PATH.
    fn find() -> Option<&'static Self> {
        static TOOLS: OnceLock<Option<Tools>> = OnceLock::new();
        TOOLS.get_or_init(Self::look).as_ref()
    }

    fn look() -> Option<Self> {
        let packages = std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(".cuda/lib")).into_iter().flatten();
        let packaged = packages
            .flatten()
            .map(|python| python.path().join("site-packages/nvidia/cu13"))
            .find(|package| package.join("bin/cuobjdump").is_file());
        let (programs, libraries) = match packaged {
            Some(package) => (package.join("bin"), Some(package.join("lib"))),
            None => {
                let path = std::env::var_os("PATH").unwrap_or_default();
                let programs = std::env::split_paths(&path)
                    .find(|folder| folder.join("nvcc").is_file() && folder.join("cuobjdump").is_file())?;
                (programs, None)
            }
        };
        let compiler = Compiler::find_at(libraries.as_deref()).ok()?;
        Some(Self { programs, compiler })
    }

    fn run(&self, program: &str, arguments: &[&str]) -> String {
        let output = Command::new(self.programs.join(program)).args(arguments).output().expect("the program starts");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let (out, log) = (text(&output.stdout), text(&output.stderr));
        assert!(output.status.success(), "{program} {arguments:?} failed:\n{out}{log}");
        out + &log
    }
}

macro_rules! tools_or_skip {
    () => {
        match Tools::find() {
            Some(tools) => tools,
            None => {
                eprintln!("skipped: no CUDA compiler in .cuda or on the PATH");
                return;
            }
        }
    };
}

/// A variant, what the compiler said of it, and its machine code as text.
struct Checked {
    variant: Variant,
    compiled: Compiled,
    registers: u32,
    static_shared: u32,
    code: Vec<Instruction>,
}

/// Compiles and disassembles every variant, once for all tests.
fn all_checked(tools: &'static Tools) -> &'static [Checked] {
    static CHECKED: OnceLock<Vec<Checked>> = OnceLock::new();
    CHECKED.get_or_init(|| {
        let folder = Scratch::new("cubins");
        let check = |variant: Variant| {
            let compiled = tools.compiler.compile(&variant).unwrap_or_else(|error| panic!("{error}"));
            let file = folder.0.join(format!("{}.cubin", variant.to_string().replace([' ', '='], "_")));
            std::fs::write(&file, compiled.cubin.bytes()).unwrap();
            let file = file.to_str().unwrap();
            let usage = tools.run("cuobjdump", &["-res-usage", file]);
            let (registers, static_shared) = (number_after(&usage, "REG:"), number_after(&usage, "SHARED:"));
            let code = tools.run("cuobjdump", &["-sass", file]).lines().filter_map(Instruction::parse).collect();
            Checked { variant, compiled, registers, static_shared, code }
        };
        Variant::all().into_par_iter().map(check).collect()
    })
}

/// A folder for one test run, removed at its end.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("sonicmoe-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        Self(folder)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// One line of SASS: `/*0c50*/  @P0 HGMMA.64x256x16.F32.BF16 R24, …`.
struct Instruction {
    address: usize,
    text: String,
}

impl Instruction {
    fn parse(line: &str) -> Option<Self> {
        let (address, rest) = line.trim_start().strip_prefix("/*")?.split_once("*/")?;
        let address = usize::from_str_radix(address, 16).ok()?;
        let text = rest.split(';').next()?.trim();
        (!text.is_empty() && !text.starts_with("/*")).then(|| Self { address, text: text.into() })
    }

    /// The name without predicate and modifiers.
    fn name(&self) -> &str {
        let mut words = self.text.split_whitespace();
        let first = words.next().unwrap_or("");
        let name = if first.starts_with('@') { words.next().unwrap_or("") } else { first };
        name.split('.').next().unwrap_or("")
    }

    /// Where a loop begins, for the branch that closes it.
    fn loop_start(&self) -> Option<usize> {
        let target = self.text.rsplit_once("0x").filter(|_| self.name() == "BRA")?.1;
        usize::from_str_radix(target.trim(), 16).ok().filter(|&target| target <= self.address)
    }
}

/// The shortest loop that holds an instruction of this name.
fn innermost_loop<'c>(code: &'c [Instruction], name: &str) -> Option<Vec<&'c Instruction>> {
    code.iter()
        .filter_map(|branch| branch.loop_start().map(|start| start..=branch.address))
        .map(|range| code.iter().filter(|instruction| range.contains(&instruction.address)).collect::<Vec<_>>())
        .filter(|body| body.iter().any(|instruction| instruction.name() == name))
        .min_by_key(Vec::len)
}

fn number_after(text: &str, label: &str) -> u32 {
    let at = text.rfind(label).unwrap_or_else(|| panic!("no {label} in:\n{text}")) + label.len();
    let digits: String = text[at..].chars().take_while(char::is_ascii_digit).collect();
    digits.parse().unwrap()
}

/// The grouped GEMMs: how each brings its operands in.
fn loads(kernel: KernelName) -> Option<&'static [&'static str]> {
    const TMA: &str = "UTMALDG";
    const GATHER: &str = "LDGSTS";
    match kernel {
        KernelName::DownForward | KernelName::UpBackwardActivation => Some(&[TMA]),
        KernelName::UpForward
        | KernelName::DownBackwardActivation
        | KernelName::DownBackwardWeight
        | KernelName::UpBackwardWeight => Some(&[TMA, GATHER]),
        _ => None,
    }
}

#[test]
fn no_kernel_spills_or_uses_local_memory() {
    for Checked { variant, compiled, code, .. } in all_checked(tools_or_skip!()) {
        let log = &compiled.log;
        let frames = log.lines().filter(|line| line.contains("bytes stack frame"));
        for frame in frames {
            let none = frame.contains(" 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads");
            assert!(none, "{variant}: {frame}");
        }
        assert!(log.contains("bytes stack frame"), "{variant}: ptxas said nothing of its stack:\n{log}");
        let local: Vec<_> = code.iter().filter(|code| matches!(code.name(), "LDL" | "STL")).collect();
        assert!(local.is_empty(), "{variant} uses local memory: {}", local[0].text);
    }
}

#[test]
fn the_compiler_serialises_no_tensor_core_work_and_ignores_no_register_request() {
    for Checked { variant, compiled, .. } in all_checked(tools_or_skip!()) {
        // C7508: setmaxnreg ignored. C7511: wgmma serialised. C7517, C7519: waits injected.
        let note = compiled.log.lines().find(|line| line.contains("(C75"));
        assert_eq!(note, None, "{variant}");
    }
}

#[test]
fn every_grouped_gemm_multiplies_on_tensor_cores_and_brings_its_operands_past_registers() {
    for Checked { variant, code, .. } in all_checked(tools_or_skip!()) {
        let Some(loads) = loads(variant.kernel()) else { continue };
        let main_loop = innermost_loop(code, "HGMMA").unwrap_or_else(|| panic!("{variant}: no HGMMA inside a loop"));
        let slow =
            main_loop.iter().find(|instruction| matches!(instruction.name(), "FFMA" | "LDG" | "STG" | "LDL" | "STL"));
        assert!(slow.is_none(), "{variant}: the main loop holds {}", slow.map_or("", |slow| &slow.text));
        for &load in loads {
            assert!(code.iter().any(|instruction| instruction.name() == load), "{variant} has no {load}");
        }
    }
}

/// What each variant takes of a multiprocessor, compared with the file under version control.
///
/// `SONICMOE_UPDATE_SNAPSHOT=1` rewrites the file after a change that was meant.
#[test]
fn registers_shared_memory_and_stages_are_those_of_the_snapshot() {
    let tools = tools_or_skip!();
    let mut found = format!("# NVRTC {}: registers, shared memory (static + dynamic bytes), stages\n", tools.compiler);
    for Checked { variant, compiled, registers, static_shared, .. } in all_checked(tools) {
        write!(found, "{variant}: {registers} registers, {static_shared}").unwrap();
        match compiled.cubin.geometry().unwrap() {
            Some(geometry) => writeln!(found, " + {} bytes, {} stages", geometry.shared_bytes, geometry.stages),
            None => writeln!(found, " + 0 bytes"),
        }
        .unwrap();
    }
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/kernels.snapshot");
    if std::env::var_os("SONICMOE_UPDATE_SNAPSHOT").is_some() {
        std::fs::write(&file, &found).unwrap();
    }
    let kept = std::fs::read_to_string(&file).unwrap_or_default();
    if kept.lines().next() != found.lines().next() {
        eprintln!("skipped: the snapshot is of another compiler ({:?})", kept.lines().next());
        return;
    }
    let by_name = |text: &str| -> BTreeMap<String, String> {
        text.lines().filter_map(|line| line.split_once(": ")).map(|(name, uses)| (name.into(), uses.into())).collect()
    };
    assert_eq!(by_name(&kept), by_name(&found), "run with SONICMOE_UPDATE_SNAPSHOT=1 if the change is meant");
}

#[test]
fn a_block_of_every_kernel_fits_a_hopper_multiprocessor() {
    for Checked { variant, compiled, registers, static_shared, .. } in all_checked(tools_or_skip!()) {
        let geometry = compiled.cubin.geometry().unwrap();
        assert_eq!(geometry.is_some(), loads(variant.kernel()).is_some(), "{variant}: who declares a launch geometry");
        let (threads, dynamic) = geometry.map_or((256, 0), |geometry| (geometry.threads, geometry.shared_bytes));
        assert!(threads * registers <= 65536, "{variant}: {threads} threads of {registers} registers");
        assert!(static_shared + dynamic <= 232_448, "{variant}: {static_shared} + {dynamic} bytes of shared memory");
    }
}

#[test]
fn the_same_sources_compile_under_nvcc() {
    let tools = tools_or_skip!();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
    let folder = Scratch::new("nvcc");
    KernelName::ALL.par_iter().for_each(|&kernel| {
        let variant = match kernel {
            KernelName::UpForward => Variant::up_forward(Activation::SwiGlu, true),
            KernelName::DownForward => Variant::down_forward(true),
            KernelName::DownBackwardActivation => Variant::down_backward_activation(Activation::SwiGlu),
            other => Variant::of(other),
        };
        let cubin = folder.0.join(format!("{}.cubin", kernel.name()));
        let source = root.join(format!("{}.cu", kernel.name()));
        let constants = variant.constants();
        let mut arguments = vec![
            "-gencode=arch=compute_90a,code=sm_90a",
            "-std=c++17",
            "-O3",
            "-Xptxas=-v,--warn-on-spills,--warning-as-error",
            "-cubin",
            "-I",
            root.to_str().unwrap(),
            "-o",
            cubin.to_str().unwrap(),
            source.to_str().unwrap(),
        ];
        arguments.extend(constants.iter().map(String::as_str));
        let log = tools.run("nvcc", &arguments);
        assert!(!log.contains("(C75"), "{variant}:\n{log}");
    });
}

#[test]
fn a_compiled_kernel_is_found_again_and_a_damaged_file_is_compiled_anew() {
    let tools = tools_or_skip!();
    let folder = Scratch::new("cache");
    let cache = CubinCache::at(&folder.0, Ok(tools.compiler));
    let variant = Variant::of(KernelName::CombineOutput);
    assert_eq!(cache.holds(&variant), None);
    let (first, found) = cache.get(&variant).unwrap();
    assert_eq!(found, Found::Compiled);
    let (again, found) = cache.get(&variant).unwrap();
    assert_eq!(found, Found::Cached);
    assert!(first == again);

    // Another constant is another kernel, and a file cut short is none.
    assert_eq!(cache.holds(&variant.clone().with("COMBINE_ROWS_IN_FLIGHT", 4)), None);
    let file = std::fs::read_dir(&folder.0).unwrap().next().unwrap().unwrap().path();
    std::fs::write(&file, &first.bytes()[..100]).unwrap();
    assert_eq!(cache.get(&variant).unwrap().1, Found::Compiled);
    assert_eq!(cache.get(&variant).unwrap().1, Found::Cached);
}

#[test]
fn several_threads_and_caches_share_a_folder() {
    let tools = tools_or_skip!();
    let folder = Scratch::new("shared-cache");
    let variant = Variant::of(KernelName::ScoreGradient);
    let cubins: Vec<Vec<u8>> = (0..4)
        .into_par_iter()
        .map(|_| CubinCache::at(&folder.0, Ok(tools.compiler)).get(&variant).unwrap().0.bytes().to_vec())
        .collect();
    assert!(cubins.iter().all(|cubin| *cubin == cubins[0]));
    let files: Vec<_> = std::fs::read_dir(&folder.0).unwrap().flatten().map(|entry| entry.path()).collect();
    assert_eq!(files.len(), 1, "{files:?}");
}

#[test]
fn a_source_that_the_compiler_refuses_is_an_error_with_its_log() {
    let tools = tools_or_skip!();
    let unknown = Variant::of(KernelName::UpForward).with("SONIC_ACTIVATION", 99);
    let error = tools.compiler.compile(&unknown).err().expect("99 names no activation").to_string();
    assert!(error.contains("unknown SONIC_ACTIVATION") && error.contains("up_forward"), "{error}");
}
