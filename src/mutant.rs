//! Planted bugs, as values that the CPU path, the router and token rounding take.
//!
//! A check is worth what it catches. Each [`Mutant`] is one fault of the kind that MoE kernels have
//! really had; `sonicmoe score` lists which oracle catches which. A value of an enum cannot go stale as
//! a patch of the source does: it is compiled, and a test asserts that it changes the results.

use std::fmt;
use std::str::FromStr;

use crate::activation::Activation;
use crate::element::Element;
use crate::error::{Error, Result};
use crate::problem::{Gating, Problem};
use crate::routing::{Convention, Routing};
use crate::shape::ExpertId;

/// Rows, columns and terms that a tile of the mutants takes: what lies past the last whole tile is a tail.
pub const TILE: usize = 16;

/// What kind of fault it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Class {
    /// Zeros, NaN, infinities in the place of results.
    ZerosAndNan,
    /// An expert without tokens.
    EmptyExpert,
    /// What lies past the last whole tile.
    Tails,
    /// One row lost, repeated, or taken from its neighbour.
    Rows,
    /// A stripe of columns written twice.
    Stripes,
    /// One element.
    OneElement,
    /// Gate and up, and the order of w1's rows.
    Layout,
    /// The activation or its derivative.
    Activation,
    /// The scores of the pairs.
    Scores,
    /// b1, b2 and their gradients.
    Biases,
    /// The softmax of the router.
    Softmax,
    /// A router of sigmoids, groups, and a bias that only chooses.
    Groups,
    /// Where and how often numbers are rounded.
    Precision,
    /// A gradient with a part missing or twice.
    Gradients,
    /// Memory that was not written.
    Stale,
    /// The choice of experts.
    TopK,
    /// Token rounding.
    TokenRounding,
}

/// The table of mutants: variant, name, what it does.
macro_rules! mutants {
    ($($class:ident { $($variant:ident $name:literal $does:literal,)+ })+) => {
        /// One planted bug.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Mutant {
            $($(#[doc = $does] $variant,)+)+
        }

        impl Mutant {
            /// Every mutant, class by class.
            pub const ALL: &'static [Self] = &[$($(Self::$variant,)+)+];

            /// What kind of fault it is.
            pub fn class(self) -> Class {
                match self { $($(Self::$variant => Class::$class,)+)+ }
            }

            /// The name used on the command line and in reports.
            pub fn name(self) -> &'static str {
                match self { $($(Self::$variant => $name,)+)+ }
            }

            /// What it does, in a line.
            pub fn does(self) -> &'static str {
                match self { $($(Self::$variant => $does,)+)+ }
            }
        }
    };
}

mutants! {
    ZerosAndNan {
        ZeroOutput "zero o" "o stays 0",
        ZeroGradients "zero gradients" "dx, dw1, dw2, db1, db2 and ds stay 0",
        NanRow "NaN row" "one row of o is NaN",
        InfiniteElement "infinite element" "one element of dw1 is infinite",
    }
    EmptyExpert {
        EmptyExpertUnwritten "empty expert unwritten" "dw1 of an expert without tokens is never written: NaN was there",
        EmptyExpertStale "empty expert stale" "dw2 of an expert without tokens holds another expert's",
    }
    Tails {
        RowTailUnwritten "row tail of y" "rows of y past an expert's last whole tile stay 0",
        ColumnTailUnwritten "n tail of a" "columns of a past the last whole tile stay 0",
        TermTailOfUp "k tail of h" "terms of x W1ᵀ past the last whole tile of d are left out",
        TermTailOfDown "k tail of dA" "terms of dout W2 past the last whole tile of d are left out",
        RowTailOfWeights "row tail of dW" "rows past an expert's last whole tile are left out of dw1 and dw2",
    }
    Rows {
        RowLost "row lost in o" "one pair's y is left out of the sum of its token",
        RowRepeated "row repeated in y" "one row of y is the one before it",
        RowOfNeighbour "x of the neighbour" "kernel 1 gathers x of the row before for one row",
        DoutOfNeighbour "dout of the neighbour" "kernel 4 computes one row from the row before",
        RowLostInDx "row lost in dx" "one pair's dx̃ is left out of the sum of its token",
    }
    Stripes {
        StripeInY "stripe in y" "columns 16..32 of y are columns 0..16",
        StripeInDw1 "stripe in dw1" "columns 16..32 of dw1 are columns 0..16",
    }
    OneElement {
        SignInO "sign in o" "one element of o has the other sign",
        UlpsInO "8 ulps in o" "one element of o is 8 units in the last place too large",
        SignInDw2 "sign in dw2" "one element of dw2 has the other sign",
        UlpsInDx "8 ulps in dx" "one element of dx is 8 units in the last place too large",
    }
    Layout {
        GateUpSwapped "gate and up swapped" "w1 is read, and dw1 written, with gate and up swapped",
        GateUpSwappedInDw1 "gate, up swapped in dw1" "dw1 is written with gate and up swapped",
        ConcatenatedGateFirst "w1 concatenated" "w1 is read, and dw1 written, as n gates and then n ups",
        ConcatenatedUpFirst "w1 up first" "w1 is read, and dw1 written, as n ups and then n gates",
    }
    Activation {
        GeluForSilu "GELU for SiLU" "forward and backward take GELU where SiLU was asked for",
        SlopeWithoutTail "σ for silu′" "the derivative of silu is σ, without 1 + gate(1 − σ)",
        UpWithoutActivation "dup without σ" "dup = dA·gate instead of dA·silu(gate)",
        GateWithoutUp "dgate without up" "dgate = dA·silu′(gate), without up",
        GateUnclamped "gate not clamped" "gpt-oss's gate goes beyond 7",
        GateClampedBelow "gate clamped below" "gpt-oss's gate is clamped at −7 as up is",
        UpUnclamped "up not clamped" "gpt-oss's up goes beyond ±7",
        UpClampedAbove "up clamped above only" "gpt-oss's up goes below −7",
        GradientBeyondClamp "gradient beyond the clamps" "gpt-oss's gradients pass beyond the clamps as inside",
        UpNotLifted "up + 1 without 1" "gpt-oss's gate is multiplied with up, not with up + 1",
        SteepnessMissing "1.702 left out" "gpt-oss's gate goes through σ(gate), not σ(1.702·gate)",
    }
    Scores {
        ScoresSwapped "scores swapped" "two pairs of one token have each other's scores in the sum of o",
        DsSwapped "ds swapped" "two pairs of one token have each other's ds",
        ScoresOff "scores off by 1%" "o is summed with scores 1% too large",
        ScoresStored "scores in storage type" "scores are rounded to the tensors' type",
        ScoreMissingInDa "score missing in dA" "dA = dout W2, without the score",
        ScoreMissingInDw2 "score missing in dW2" "a′ = a, without the score",
        ScoreTwiceInO "score twice in o" "o sums s²·y",
        ScoreTwiceInDa "score twice in dA" "dA = s²·dout W2",
        ScoreInDs "score in ds" "ds is multiplied with the score",
    }
    Biases {
        B1Missing "b1 missing" "h = x W1ᵀ, without b1",
        B2Missing "b2 missing" "y = a W2ᵀ, without b2",
        B2Unweighted "b2 unweighted" "b2 enters o without the score",
        B2MissingInDs "b2 missing in ds" "ds = ⟨dout W2, A⟩, without ⟨dout, b2⟩",
        Db2Unweighted "db2 unweighted" "db2 sums dout without the scores",
    }
    Softmax {
        SoftmaxWithoutSum "softmax without its sum" "dlogits = s·g instead of s(g − Σgs)",
        RawProbabilities "softmax over all E" "scores are probabilities over all experts, not over the chosen",
        Renormalized "top-K over softmax, renormalised" "scores by another formula of the same function",
    }
    Groups {
        BiasInWeights "bias in the weights" "scores are of σ(l) + bias, which is for the choice",
        BiasNotChoosing "bias not in the choice" "experts are chosen by σ(l), without the bias",
        GroupOfOne "group of its best" "a group stands by its best expert, not by its two best",
        GroupsIgnored "all groups stay" "experts are chosen from all groups",
        FactorMissing "factor left out" "scores are not multiplied with the scaling factor",
        RenormalizationMissing "renormalisation left out" "scores are p in the place of p/Σp",
        SigmoidSlopeMissing "σ′ left out" "dlogits = dp, without p(1 − p)",
        TotalHeldFixed "Σp held fixed" "dp of p/Σp leaves out that of Σp",
    }
    Precision {
        StorageSumOfO "sum of o in storage type" "kernel 3 rounds every partial sum to the tensors' type",
        StorageSumOfDw1 "sum of dw1 in storage type" "kernel 7 rounds every partial sum to the tensors' type",
        HUnrounded "h not rounded" "backward reads h as the accumulator had it",
        AUnrounded "a not rounded" "kernel 2 reads a as the accumulator had it",
        YUnrounded "y not rounded" "kernel 3 reads y as the accumulator had it",
        DhUnrounded "dh not rounded" "kernels 6 and 7 read dh as the accumulator had it",
        APrimeUnrounded "a′ not rounded" "kernel 5 reads a′ as the accumulator had it",
        DxExpandedUnrounded "dx̃ not rounded" "kernel 8 reads dx̃ as the accumulator had it",
        PreActivationRounded "a from the stored h" "kernel 1 rounds h before its activation",
        ScoredYRounded "s·y rounded" "kernel 3 rounds each term",
        GRounded "dout W2 rounded" "kernel 4 rounds dout W2",
        RecomputedARounded "recomputed a rounded" "kernel 4 rounds the A that it recomputes",
        DaRounded "dA rounded" "kernel 4 rounds s·dout W2",
        DsRounded "ds in storage type" "ds is rounded to the tensors' type",
    }
    Gradients {
        DxFromGate "dx from the gate alone" "dx̃ = dgate W_gate, without the up half",
        TokenMissingInDw1 "token missing in dw1" "one row is left out of dw1",
        Dw2Doubled "dw2 doubled" "dw2 is added twice",
        RouterPartMissing "router missing in dx" "dx lacks the router's part, dlogits W_r",
        DlogitsDoubled "dlogits doubled" "the router's gradient is added twice",
    }
    Stale {
        StaleWorkspace "stale workspace" "rows of y past an expert's last whole tile are the tile's before",
        PreviousOutput "previous output" "o is that of the case before, the same tokens in the opposite order",
    }
    TopK {
        TieToLargerId "tie to the larger id" "of equal logits the larger expert id is chosen",
        GroupTieToLargerId "tie to the larger group" "of equal groups, and of equal experts in them, the larger id is chosen",
    }
    TokenRounding {
        OneTileOff "one tile off" "an expert keeps the other multiple of M than its rule says",
        WrongTokenDropped "wrong token dropped" "an expert drops its best token and keeps one that it should have dropped",
        NotMultiple "count not a multiple" "an expert keeps a token less than its multiple",
        RankingScores "scores of the ranking" "kept pairs get the ranking's renormalised scores in the place of p",
    }
}

impl Mutant {
    /// Why the mutant changes nothing here, or nothing that is wrong; none where it is a fault.
    ///
    /// Mutants of the choice and of token rounding are faults wherever logits tie, and wherever a count
    /// is no multiple: that is seen on logits, not on a layer.
    pub fn equivalent<S: Element>(self, problem: &Problem<'_, S>, routing: &Routing) -> Option<&'static str> {
        let counts = || (0..routing.experts()).map(|e| routing.rows_of_expert(ExpertId(e as u32)).len());
        let convention = match problem.gating() {
            Gating::Router(router) => Some(router.convention),
            Gating::Given { .. } => None,
        };
        let grouped = match convention {
            Some(Convention::GroupedSigmoid(router)) => Some(router),
            _ => None,
        };
        let sums_several = routing.routed() > routing.tokens();
        let unless = |fault: bool, reason: &'static str| (!fault).then_some(reason);
        match self {
            _ if routing.routed() == 0 => Some("no token is routed"),
            Self::EmptyExpertUnwritten | Self::EmptyExpertStale => {
                unless(counts().any(|count| count == 0), "every expert has tokens")
            }
            Self::RowTailUnwritten | Self::RowTailOfWeights | Self::StaleWorkspace => {
                unless(counts().any(|count| count % TILE != 0), "all tiles of rows are whole")
            }
            Self::ColumnTailUnwritten => unless(!problem.n().is_multiple_of(TILE), "n is a multiple of the tile"),
            Self::TermTailOfUp | Self::TermTailOfDown => {
                unless(!problem.d().is_multiple_of(TILE), "d is a multiple of the tile")
            }
            Self::RowRepeated | Self::RowOfNeighbour | Self::DoutOfNeighbour => {
                unless(counts().any(|count| count > 1), "no expert has two tokens")
            }
            Self::StripeInY | Self::StripeInDw1 => unless(problem.d() >= 2 * TILE, "d has one tile of columns"),
            Self::GateUpSwapped
            | Self::GateUpSwappedInDw1
            | Self::ConcatenatedGateFirst
            | Self::ConcatenatedUpFirst
            | Self::DxFromGate => unless(problem.activation().gated(), "the activation has no gate"),
            Self::GeluForSilu | Self::SlopeWithoutTail | Self::UpWithoutActivation | Self::GateWithoutUp => {
                unless(problem.activation() == Activation::SwiGlu, "the activation is not SwiGLU")
            }
            Self::GateUnclamped
            | Self::GateClampedBelow
            | Self::UpUnclamped
            | Self::UpClampedAbove
            | Self::GradientBeyondClamp
            | Self::UpNotLifted
            | Self::SteepnessMissing => {
                unless(problem.activation() == Activation::GptOss, "the activation is not gpt-oss's")
            }
            Self::ScoresSwapped | Self::DsSwapped => unless(sums_several, "no token has two pairs"),
            Self::StorageSumOfO => unless(sums_several, "no sum has two terms"),
            Self::B1Missing | Self::B2Missing | Self::B2Unweighted | Self::B2MissingInDs | Self::Db2Unweighted => {
                unless(problem.b1().is_some(), "the layer has no biases")
            }
            Self::SoftmaxWithoutSum | Self::RouterPartMissing | Self::DlogitsDoubled => {
                unless(convention.is_some(), "the routing is given")
            }
            Self::RawProbabilities => match convention {
                Some(Convention::TopKOverSoftmax) => Some("this is the convention"),
                Some(_) => None,
                None => Some("the routing is given"),
            },
            // p_i / Σ_C p = (e^{l_i}/Z) / (Σ_C e^l / Z) = e^{l_i} / Σ_C e^l.
            Self::Renormalized => Some("p / Σ p over the chosen is the softmax over the chosen"),
            Self::BiasInWeights | Self::BiasNotChoosing => match problem.gating() {
                Gating::Router(router) => unless(router.selection_bias.is_some(), "the choice has no bias"),
                Gating::Given { .. } => Some("the routing is given"),
            },
            Self::GroupOfOne | Self::GroupsIgnored => {
                unless(grouped.is_some_and(|router| router.kept < router.groups), "every group stays")
            }
            Self::FactorMissing => unless(grouped.is_some_and(|router| router.factor != 1.0), "there is no factor"),
            Self::RenormalizationMissing | Self::TotalHeldFixed => {
                unless(grouped.is_some_and(|router| router.renormalized), "no score is p/Σp of sigmoids")
            }
            Self::SigmoidSlopeMissing => unless(grouped.is_some(), "the router has no sigmoids"),
            Self::TieToLargerId | Self::GroupTieToLargerId => Some("logits of random data do not tie"),
            Self::OneTileOff | Self::WrongTokenDropped | Self::NotMultiple | Self::RankingScores => {
                Some("the layer takes its routing from elsewhere")
            }
            _ => None,
        }
    }
}

impl Mutant {
    /// Whether it changes the choice or its token rounding, and nothing behind them.
    pub fn of_routing(self) -> bool {
        matches!(self.class(), Class::TopK | Class::TokenRounding)
    }
}

impl fmt::Display for Mutant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Mutant {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let mut all = Self::ALL.iter().copied();
        all.find(|mutant| mutant.name() == text)
            .ok_or_else(|| Error::unknown("mutant", text, Self::ALL.iter().map(|mutant| mutant.name())))
    }
}
