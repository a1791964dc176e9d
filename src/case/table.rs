//! The edge cases that every engine runs, each with the claim that it stands for.

use super::{Case, Load, Pairing};
use crate::activation::Activation;
use crate::routing::Convention;
use crate::shape::Shape;

/// One row of the table.
#[derive(Clone, Debug)]
pub struct EdgeCase {
    /// What is at stake.
    pub claim: &'static str,
    /// The problem.
    pub case: Case,
}

/// Every edge case. Widths are multiples of 8, so that GPU engines take all of them.
pub fn edge_cases() -> Vec<EdgeCase> {
    let base = |t, d, n, e, k| Case::new(Shape { t, d, n, e, k });
    let counts = |d, n, counts: &[usize]| base(0, d, n, counts.len(), 1).with_counts(counts);
    let router = |case: Case, convention, load| case.with_pairing(Pairing::Router { convention, load });
    let mut rows: Vec<(&'static str, Case)> = vec![
        ("no token at all", base(0, 8, 8, 4, 2)),
        ("no token at all, with biases", base(0, 8, 8, 4, 2).with_biases()),
        ("one token, one expert", base(1, 8, 8, 1, 1)),
        ("tokens but no pair", counts(8, 8, &[0, 0, 0]).with_tokens(5)),
        ("the first expert is empty", counts(16, 24, &[0, 17, 5])),
        ("the last expert is empty", counts(16, 24, &[17, 5, 0])),
        ("a middle expert is empty", counts(16, 24, &[16, 0, 1])),
        ("only the last expert has tokens", counts(16, 24, &[0, 0, 0, 33])),
        ("rows at every tile edge", counts(72, 136, &[1, 127, 128, 129, 0, 63, 64, 65, 255, 256, 257])),
        ("one expert takes all tokens", counts(64, 64, &[300, 0, 0, 0])),
        ("a column tail of 8 in n", base(129, 16, 136, 5, 2)),
        ("a column tail of 8 in d", base(129, 264, 64, 5, 2)),
        ("widths below one tile", base(65, 8, 8, 3, 2)),
        ("every token goes to every expert", base(33, 16, 16, 4, 4)),
        ("perfectly balanced, K = 1 with a normalised score", base(2, 8, 8, 2, 1)),
        ("more experts than 8 bits count", base(3, 8, 8, 257, 3)),
        ("biases", base(100, 64, 72, 6, 2).with_biases()),
        ("biases and an empty expert", counts(64, 72, &[40, 0, 129]).with_biases()),
        (
            "a router that starves two experts",
            router(base(70, 32, 40, 6, 2), Convention::TopKOverSoftmax, Load::Without(vec![0, 5])),
        ),
        ("a Zipf load", router(base(200, 32, 40, 9, 3), Convention::TopKOverSoftmaxRenormalized, Load::Zipf)),
        (
            "probabilities that do not sum to 1",
            router(base(64, 32, 40, 8, 3), Convention::TopKOverSoftmax, Load::Biased),
        ),
        ("a router with a bias", router(base(64, 32, 40, 8, 3), Convention::SoftmaxOverTopK, Load::Biased)),
    ];
    for activation in Activation::ALL {
        rows.push(("each activation", base(70, 40, 24, 3, 2).with_activation(activation)));
        rows.push(("each activation with biases", base(70, 40, 24, 3, 2).with_activation(activation).with_biases()));
    }
    rows.into_iter()
        .enumerate()
        .map(|(row, (claim, case))| EdgeCase { claim, case: case.with_seed(row as u64) })
        .collect()
}

impl Case {
    /// With more tokens; those beyond the given pairs have none.
    fn with_tokens(self, t: usize) -> Self {
        Self { shape: Shape { t, ..self.shape }, ..self }
    }
}
