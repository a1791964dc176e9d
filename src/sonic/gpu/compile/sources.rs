//! The CUDA sources, carried inside the binary.

/// A source file and its path below `kernels/`, as its includes spell it.
#[derive(Clone, Copy, Debug)]
pub struct Source {
    /// The path below `kernels/`.
    pub path: &'static str,
    /// The text.
    pub text: &'static str,
}

macro_rules! source {
    ($path:literal) => {
        Source { path: $path, text: include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/kernels/", $path)) }
    };
}

/// What kernels include. NVRTC gets all of them by name, so that it needs no include path.
pub const HEADERS: &[Source] = &[
    source!("activation.cuh"),
    source!("choice.cuh"),
    source!("chunk.cuh"),
    source!("column_sum.cuh"),
    source!("combine.cuh"),
    source!("lanes.cuh"),
    source!("pair_sort.cuh"),
    source!("ranking.cuh"),
    source!("sm90/barrier.cuh"),
    source!("sm90/copy.cuh"),
    source!("sm90/gemm_config.cuh"),
    source!("sm90/grouped_gemm.cuh"),
    source!("sm90/launch.cuh"),
    source!("sm90/row_box.cuh"),
    source!("sm90/slot_ring.cuh"),
    source!("sm90/store_epilogue.cuh"),
    source!("sm90/tile_producer.cuh"),
    source!("sm90/tile_schedule.cuh"),
    source!("sm90/types.cuh"),
    source!("sm90/warp.cuh"),
    source!("sm90/weight_gemm.cuh"),
    source!("sm90/wgmma.cuh"),
    source!("witness/ball.cuh"),
    source!("softmax.cuh"),
];

macro_rules! kernels {
    ($($(#[$doc:meta])* $kernel:ident = $name:literal,)*) => {
        /// The kernels, each an entry point of a source file of the same name.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum KernelName {
            $($(#[$doc])* $kernel,)*
        }

        impl KernelName {
            /// Every kernel, in the order in which a step runs them.
            pub const ALL: &[Self] = &[$(Self::$kernel,)*];

            /// The entry point, and the file's name without `.cu`.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$kernel => $name,)*
                }
            }

            pub(super) fn source(self) -> Source {
                match self {
                    $(Self::$kernel => Source {
                        path: concat!($name, ".cu"),
                        text: include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/kernels/", $name, ".cu")),
                    },)*
                }
            }
        }
    };
}

kernels! {
    /// The K best experts of every token, and their scores; few experts.
    TopK = "top_k",
    /// The same, of many experts.
    TopKByWarp = "top_k_by_warp",
    /// The counting sort of the pairs, step 1.
    RoutingHistogram = "routing_histogram",
    /// Step 2.
    RoutingPrefix = "routing_prefix",
    /// Step 3: the routing.
    RoutingRows = "routing_rows",
    /// Token rounding: how far down each expert looks for tokens that did not choose it.
    RoundingThresholds = "rounding_thresholds",
    /// Those that it finds.
    RoundingCandidates = "rounding_candidates",
    /// Sums of ranking scores, for the rule by scores.
    RoundingSums = "rounding_sums",
    /// Down or up.
    RoundingDecision = "rounding_decision",
    /// The rows of each expert, and their scores.
    RoundingRows = "rounding_rows",
    /// The rows of each token.
    RoundingTokens = "rounding_tokens",
    /// Scores renormalised over the pairs that are left.
    RoundingKeptScores = "rounding_kept_scores",
    /// Kernel 1: h and a.
    UpForward = "up_forward",
    /// Kernel 2: y.
    DownForward = "down_forward",
    /// Kernel 3: o.
    CombineOutput = "combine_output",
    /// Kernel 4: dh, a′ and partial sums of ds.
    DownBackwardActivation = "down_backward_activation",
    /// ds from kernel 4's partial sums.
    ScoreGradient = "ds_sum",
    /// The same, with ⟨dout, b2⟩ where there are biases.
    BiasScoreGradient = "bias_score_gradient",
    /// Kernel 5: dw2.
    DownBackwardWeight = "down_backward_weight",
    /// Kernel 6: dx̃.
    UpBackwardActivation = "up_backward_activation",
    /// Kernel 7: dw1.
    UpBackwardWeight = "up_backward_weight",
    /// db1.
    UpBiasGradient = "up_bias_gradient",
    /// db2.
    DownBiasGradient = "down_bias_gradient",
    /// Kernel 8: dx.
    CombineInputGradient = "combine_input_gradient",
    /// None of the method: the f64 witness of the six products.
    WitnessProduct = "witness_product",
    /// None of the method: the f64 witness of the combines.
    WitnessCombine = "witness_combine",
    /// None of the method: what the card's memory gives.
    PlainCopy = "plain_copy",
    /// None of the method: random data for measurements and proofs.
    RandomNormal = "random_normal",
    /// dlogits, and their bf16 parts.
    LogitGradient = "logit_gradient",
    /// The router's part of dx.
    RouterInputGradient = "router_input_gradient",
    /// dW_r from its three parts.
    RouterWeightGradient = "router_weight_gradient",
    /// db_r.
    RouterBiasGradient = "router_bias_gradient",
    /// None of the method: it stalls, so that the report of a stall can be tried.
    Stall = "stall",
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::{Path, PathBuf};

    use super::*;

    fn files_below(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { files_below(&path, found) } else { found.push(path) }
        }
    }

    #[test]
    fn every_file_of_kernels_is_carried_in_the_binary() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
        let mut found = Vec::new();
        files_below(&root, &mut found);
        let found: BTreeSet<String> = found
            .iter()
            .filter(|path| path.extension().is_some_and(|extension| extension == "cu" || extension == "cuh"))
            .map(|path| path.strip_prefix(&root).unwrap().to_string_lossy().replace('\\', "/"))
            .collect();
        let kernels = KernelName::ALL.iter().map(|kernel| kernel.source().path);
        let carried = HEADERS.iter().map(|header| header.path).chain(kernels).map(String::from).collect();
        assert_eq!(found, carried);
    }
}
