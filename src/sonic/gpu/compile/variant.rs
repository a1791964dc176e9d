//! A kernel and the constants it is compiled with.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use crate::activation::{Activation, Gelu};
use crate::sonic::gpu::tuning::{MODELLED, Setting, Table};

use super::sources::{HEADERS, KernelName};

/// What every kernel is compiled with. `sm_90a` rather than `sm_90`: wgmma and setmaxnreg exist only
/// there. The log of ptxas tells of registers, spills and serialised tensor core work.
pub(super) const OPTIONS: [&str; 5] = [
    "--gpu-architecture=sm_90a",
    "--std=c++17",
    "--generate-line-info",
    "--ptxas-options=-v",
    "--ptxas-options=--warn-on-spills",
];

/// Threads of a combine's block; host and kernel count blocks with it.
pub(in crate::sonic::gpu) const COMBINE_THREADS: u32 = 128;

/// One compiled form of a kernel: the kernel and its `-D` constants.
///
/// ```
/// use sonicmoe::Activation;
/// use sonicmoe::sonic::gpu::compile::Variant;
/// let variant = Variant::up_forward(Activation::SwiGlu, true);
/// assert_eq!(variant.to_string(), "up_forward SONIC_ACTIVATION=0 SONIC_BIAS=1");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Variant {
    kernel: KernelName,
    constants: BTreeMap<&'static str, u32>,
}

impl Variant {
    /// A kernel that has no variants, or the default one of a kernel that has.
    pub fn of(kernel: KernelName) -> Self {
        let variant = Self { kernel, constants: BTreeMap::new() };
        match kernel {
            KernelName::CombineOutput | KernelName::CombineInputGradient => {
                variant.with("COMBINE_THREADS", COMBINE_THREADS)
            }
            // 10 ms: long beside any launch, short for whoever waits for the report.
            KernelName::Stall => variant.with("SONIC_WAIT_LIMIT_NS", 10_000_000),
            _ => variant,
        }
    }

    /// Kernel 1.
    pub fn up_forward(activation: Activation, bias: bool) -> Self {
        Self::of(KernelName::UpForward).activation(activation).bias(bias)
    }

    /// Kernel 2.
    pub fn down_forward(bias: bool) -> Self {
        Self::of(KernelName::DownForward).bias(bias)
    }

    /// Kernel 4.
    pub fn down_backward_activation(activation: Activation) -> Self {
        Self::of(KernelName::DownBackwardActivation).activation(activation)
    }

    /// The f64 witness of a product: of a result stored as it is (0), of kernel 1 (1) or of kernel 4 (2).
    pub(in crate::sonic::gpu) fn witness_product(what: u32) -> Self {
        Self::of(KernelName::WitnessProduct).with("SONIC_WITNESS", what)
    }

    /// The choice of `k` experts among so many, with or without sums over all of them.
    pub fn top_k(experts: usize, k: usize, sums: bool) -> Self {
        if k > 16 {
            return Self::of(KernelName::TopKByWarp);
        }
        // Quads of experts that each of a token's eight lanes holds.
        let quads = match experts {
            0..=32 => 1,
            33..=128 => 4,
            129..=256 => 8,
            257..=512 => 16,
            _ => return Self::of(KernelName::TopKByWarp),
        };
        Self::of(KernelName::TopK).with("SONIC_QUADS", quads).with("SONIC_SUMS", u32::from(sums))
    }

    /// The same with one more constant, for tile settings other than a kernel's own.
    pub fn with(mut self, constant: &'static str, value: u32) -> Self {
        self.constants.insert(constant, value);
        self
    }

    /// The same with these constants.
    pub fn with_all(self, constants: &BTreeMap<&'static str, u32>) -> Self {
        constants.iter().fold(self, |variant, (name, value)| variant.with(name, *value))
    }

    /// Every variant that the engine may ask for: of the GEMMs with their own settings, with those of the carried
    /// table, and with those that the cost model may choose.
    pub fn all() -> Vec<Self> {
        let table = Table::carried().unwrap_or_default();
        let settings = |kernel: KernelName| -> BTreeSet<BTreeMap<&'static str, u32>> {
            let modelled = MODELLED.contains(&kernel).then(|| Setting::narrow(kernel)).flatten();
            let chosen = table.settings(kernel).chain(modelled).map(|setting| setting.constants(kernel));
            chosen.chain([BTreeMap::new()]).collect()
        };
        let untuned = Self::all_untuned().into_iter();
        untuned
            .flat_map(|variant| {
                settings(variant.kernel).into_iter().map(move |constants| variant.clone().with_all(&constants))
            })
            .collect()
    }

    fn all_untuned() -> Vec<Self> {
        KernelName::ALL
            .iter()
            .flat_map(|&kernel| match kernel {
                KernelName::UpForward => Activation::WITH_KERNELS
                    .into_iter()
                    .flat_map(|activation| [false, true].map(|bias| Self::up_forward(activation, bias)))
                    .collect(),
                KernelName::DownForward => [false, true].map(Self::down_forward).to_vec(),
                KernelName::DownBackwardActivation => {
                    Activation::WITH_KERNELS.into_iter().map(Self::down_backward_activation).collect()
                }
                KernelName::WitnessProduct => (0..3).map(Self::witness_product).collect(),
                KernelName::TopK => [32, 128, 256, 512]
                    .into_iter()
                    .flat_map(|experts| [false, true].map(|sums| Self::top_k(experts, 1, sums)))
                    .collect(),
                _ => vec![Self::of(kernel)],
            })
            .collect()
    }

    /// The kernel.
    pub fn kernel(&self) -> KernelName {
        self.kernel
    }

    /// The value of a constant that this variant sets.
    pub fn constant(&self, name: &str) -> Option<u32> {
        self.constants.get(name).copied()
    }

    /// The compiler's options: those of every kernel, then this variant's constants. nvcc takes the
    /// constants as they are.
    pub fn constants(&self) -> Vec<String> {
        self.constants.iter().map(|(name, value)| format!("-D{name}={value}")).collect()
    }

    pub(super) fn options(&self) -> Vec<String> {
        OPTIONS.map(String::from).into_iter().chain(self.constants()).collect()
    }

    /// A fingerprint of everything that the compiler reads: source, headers and options.
    pub fn fingerprint(&self) -> u128 {
        let source = self.kernel.source();
        let files = HEADERS.iter().chain([&source]).flat_map(|file| [file.path, file.text]);
        let options = self.options();
        // A length before each part: no two lists of parts give the same bytes.
        files
            .chain(options.iter().map(String::as_str))
            .fold(FNV_OFFSET, |hash, part| fnv(fnv(hash, &(part.len() as u64).to_le_bytes()), part.as_bytes()))
    }

    fn activation(self, activation: Activation) -> Self {
        // The numbers of kernels/activation.cuh.
        self.with(
            "SONIC_ACTIVATION",
            match activation {
                Activation::SwiGlu => 0,
                Activation::GeGlu(Gelu::Exact) => 1,
                Activation::GeGlu(Gelu::Tanh) => 2,
                Activation::ReGlu => 3,
                Activation::Silu => 4,
                Activation::Gelu(Gelu::Exact) => 5,
                Activation::Gelu(Gelu::Tanh) => 6,
                Activation::Relu => 7,
                Activation::ReluSquared => 8,
                // No functor has it: the layer is refused before, and the source would not compile.
                Activation::GptOss => u32::MAX,
            },
        )
    }

    fn bias(self, bias: bool) -> Self {
        self.with("SONIC_BIAS", bias.into())
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.kernel.name())?;
        self.constants.iter().try_for_each(|(name, value)| write!(f, " {name}={value}"))
    }
}

// FNV-1a of 128 bits: unlike the standard library's hashes, the same in every build.
const FNV_OFFSET: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
const FNV_PRIME: u128 = 0x0100_0000_0000_0000_0000_013b;

fn fnv(hash: u128, bytes: &[u8]) -> u128 {
    bytes.iter().fold(hash, |hash, &byte| (hash ^ u128::from(byte)).wrapping_mul(FNV_PRIME))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variants_differ_in_their_fingerprints() {
        let variants = Variant::all();
        let fingerprints: BTreeSet<_> = variants.iter().map(Variant::fingerprint).collect();
        assert_eq!(fingerprints.len(), variants.len());
    }

    #[test]
    fn the_hash_is_fnv_1a() {
        assert_eq!(fnv(FNV_OFFSET, b"a"), 0xd228_cb69_6f1a_8caf_7891_2b70_4e4a_8964);
    }
}
