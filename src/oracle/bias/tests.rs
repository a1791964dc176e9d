use ndarray::Axis;

use super::*;
use crate::activation::Activation;
use crate::case::{Case, Pairing};
use crate::oracle::bound::numerics_of;

/// ds = Σ g·silu(h), and h is off by a rounding of mean 0 and deviation σ: on average silu(h) is off by
/// ½ silu″(h)σ². An engine whose sums do not round has that bias, though it is correct.
#[test]
fn what_the_curvature_of_an_activation_shifts_is_counted_as_systematic() {
    let case = Case::new("200,16,24,1,1".parse().unwrap()).with_pairing(Pairing::TopK);
    let problem = case.with_activation(Activation::Silu).problem::<f64>().unwrap();
    let Gating::Given { routing, .. } = problem.gating() else { panic!("pairs are given") };
    let numerics = numerics_of(DType::BF16, RoundingModel::Fused);
    let numerics = Numerics { accumulator: DType::F64.unit_roundoff(), score: DType::F64, ..numerics };
    let twin = Twin::new(&problem, routing, &numerics).unwrap();

    let g = problem.dout().dot(&problem.w2().index_axis(Axis(0), 0));
    let (h, sigma) = (&twin.truth[&Output::H], &twin.random[&Output::H]);
    let second = |h: f64| {
        let on = 1.0 / (1.0 + libm::exp(-h));
        on * (1.0 - on) * (2.0 + h * (1.0 - 2.0 * on))
    };
    let (mut shifts, mut counted) = (0.0, 0.0);
    for (pair, token) in routing.pair_token().iter().enumerate() {
        let row = routing.row_pair().iter().position(|&of_row| of_row as usize == pair).unwrap();
        let of_unit = |unit: usize| {
            let at = [row, unit];
            g[[token.index(), unit]] * 0.5 * second(h[at]) * sigma[at] * sigma[at]
        };
        shifts += (0..problem.n()).map(of_unit).sum::<f64>().abs();
        counted += twin.systematic[&Output::Ds][[pair]];
    }
    assert!(shifts <= counted, "{shifts:e} on average, {counted:e} counted");
    // And no more than the roundings themselves.
    assert!(counted < 0.01 * twin.random[&Output::Ds].sum(), "{counted:e}");
}
