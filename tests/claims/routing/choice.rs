//! The choice is the K largest logits, exactly; the certificate accepts it and nothing else.

use half::bf16;
use ndarray::{Array1, Array2, ArrayView1, array, s};
use proptest::prelude::*;
use sonicmoe::routing::certificate::{Violation, certify_choice, certify_choice_within, certify_grouped_choice};
use sonicmoe::routing::{Choice, GroupedSigmoid, grouped_top_k, top_k};
use sonicmoe::{DType, ErrorClass, ExpertId};

use super::{experts, logits_and_k, only, random, raw};

const INF: f32 = f32::INFINITY;

proptest! {
    #![proptest_config(random(256))]

    #[test]
    fn a_choice_is_certified_whatever_the_ties_and_masks((logits, k) in logits_and_k(12, 40)) {
        let choice = top_k(logits.view(), k)?;
        prop_assert_eq!(certify_choice(logits.view(), k, choice.ids()), Ok(()));
        let in_f64 = top_k(logits.mapv(f64::from).view(), k)?;
        prop_assert_eq!(&in_f64, &choice, "widening changes no comparison");
    }

    #[test]
    fn no_other_choice_is_certified(
        (logits, k) in logits_and_k(6, 12), token in any::<prop::sample::Index>(), other in prop::collection::vec(0u32..12, 12)
    ) {
        let (tokens, e) = logits.dim();
        prop_assume!(tokens > 0);
        let mut ids = top_k(logits.view(), k)?.ids().to_owned();
        let before = ids.clone();
        let mut row = ids.row_mut(token.index(tokens));
        for (id, &other) in row.iter_mut().zip(&other) {
            *id = ExpertId(other % (e as u32 + 1));
        }
        prop_assume!(ids != before);
        prop_assert!(certify_choice(logits.view(), k, ids.view()).is_err());
    }

    #[test]
    fn a_choice_from_rounded_logits_is_certified_within_their_error((logits, k) in logits_and_k(12, 40)) {
        let rounded = logits.mapv(bf16::from_f32);
        let choice = top_k(rounded.mapv(bf16::to_f32).view(), k)?;
        let within = logits.mapv(|logit| if logit.is_finite() { f64::from(logit.abs()) * DType::BF16.unit_roundoff() } else { 0.0 });
        prop_assert_eq!(certify_choice_within(logits.view(), within.view(), k, choice.ids()), Ok(()));
        prop_assert_eq!(certify_choice(rounded.view(), k, choice.ids()), Ok(()));
    }
}

/// What σ in f64 and the certificate's own may err by.
const OF_SIGMOID: f64 = 8.0 * f64::EPSILON;

proptest! {
    #![proptest_config(random(256))]

    #[test]
    fn a_choice_inside_groups_is_certified_and_with_one_expert_exchanged_it_is_not(
        numbers in prop::collection::vec(-3.0f64..3.0, 5 * 12),
        bias in prop::collection::vec(-0.2f64..0.2, 12),
        (groups, kept, k) in (1..=6usize).prop_filter("groups of equal size", |groups| 12 % groups == 0)
            .prop_flat_map(|groups| (Just(groups), 1..=groups))
            .prop_flat_map(|(groups, kept)| (Just(groups), Just(kept), 1..=kept * 12 / groups)),
        (place, other) in (any::<prop::sample::Index>(), any::<prop::sample::Index>()),
    ) {
        let logits = Array2::from_shape_vec((5, 12), numbers).unwrap();
        let bias = ndarray::Array1::from(bias);
        let router = GroupedSigmoid { groups, kept, renormalized: true, factor: 1.0 };
        let choice = grouped_top_k(logits.view(), Some(bias.view()), k, &router)?;
        let certified = |ids: ndarray::ArrayView2<ExpertId>| {
            certify_grouped_choice(logits.view(), Some(bias.view()), &router, OF_SIGMOID, k, ids)
        };
        prop_assert_eq!(certified(choice.ids()), Ok(()));
        let mut ids = choice.ids().to_owned();
        let left_out: Vec<u32> = (0..12).filter(|&expert| !ids.row(2).iter().any(|id| id.0 == expert)).collect();
        prop_assume!(!left_out.is_empty());
        ids[[2, place.index(k)]] = ExpertId(left_out[other.index(left_out.len())]);
        prop_assert!(certified(ids.view()).is_err(), "{:?} for {:?}", ids.row(2), choice.ids().row(2));
    }
}

#[test]
fn a_choice_inside_groups_that_cannot_be_made_is_refused_by_name() {
    let logits = array![[0.0f32, 1.0, 3.0, 2.0, -1.0, -1.0]];
    let refused = |groups, kept, k| {
        let router = GroupedSigmoid { groups, kept, renormalized: false, factor: 1.0 };
        grouped_top_k(logits.view(), None, k, &router).unwrap_err().to_string()
    };
    assert!(refused(4, 1, 1).contains("the number of expert groups"), "{}", refused(4, 1, 1));
    assert!(refused(6, 1, 1).contains("the size of an expert group"), "{}", refused(6, 1, 1));
    assert!(refused(3, 4, 1).contains("the number of kept groups"), "{}", refused(3, 4, 1));
    assert!(refused(3, 1, 3).contains("K"), "{}", refused(3, 1, 3));
    assert!(refused(3, 1, 0).starts_with("K = 0"), "{}", refused(3, 1, 0));
    // Nor is there anything to certify.
    let certify = |groups, bias: Option<ArrayView1<f32>>| {
        let router = GroupedSigmoid { groups, kept: 1, renormalized: false, factor: 1.0 };
        certify_grouped_choice(logits.view(), bias, &router, OF_SIGMOID, 1, experts(&[[2]]).view())
    };
    let bias = Array1::<f32>::zeros(6);
    assert_eq!(certify(3, Some(bias.view())), Ok(()));
    assert_eq!(only(certify(4, None)), Violation::TopK { k: 1, experts: 6 });
    assert_eq!(only(certify(3, Some(bias.slice(s![..5])))), Violation::TopK { k: 1, experts: 6 });
}

#[test]
fn behind_groups_too_a_logit_that_allows_no_choice_is_named() {
    let router = GroupedSigmoid { groups: 3, kept: 1, renormalized: false, factor: 1.0 };
    for (expert, value) in [(0, f64::INFINITY), (5, f64::NAN)] {
        let mut logits = array![[0.0, 1.0, 3.0, 2.0, -1.0, -1.0]];
        logits[[0, expert]] = value;
        let ids = array![[ExpertId(2), ExpertId(3)]];
        let found = certify_grouped_choice(logits.view(), None, &router, OF_SIGMOID, 2, ids.view()).unwrap_err();
        let named = |violation: &Violation| {
            matches!(violation, Violation::Number { array: "router_logits", token: 0, expert: named, value: found }
                if *named == expert && found.to_bits() == value.to_bits())
        };
        assert!(found.iter().any(named), "{found:?}");
    }
}

#[test]
fn groups_within_their_error_may_stand_for_each_other() {
    let logits = array![[1.0, 1.0, 1.0 + 1e-9, 1.0, -1.0, -1.0]];
    let router = GroupedSigmoid { groups: 3, kept: 1, renormalized: false, factor: 1.0 };
    let certified = |ids: [u32; 2], error: f64| {
        let ids = array![[ExpertId(ids[0]), ExpertId(ids[1])]];
        certify_grouped_choice(logits.view(), None, &router, error, 2, ids.view()).is_ok()
    };
    assert!(certified([2, 3], 1e-12) && !certified([0, 1], 1e-12));
    assert!(certified([2, 3], 1e-8) && certified([0, 1], 1e-8));
    assert!(!certified([4, 5], 1e-8) && !certified([0, 2], 1e-8));
}

/// A sum σ(l) + bias errs with the size of the bias as well.
#[test]
fn a_bias_widens_the_error_within_which_experts_may_stand_for_each_other() {
    let logits = array![[0.0, 0.0, -1.0, -1.0]];
    let router = GroupedSigmoid { groups: 1, kept: 1, renormalized: false, factor: 1.0 };
    let certified = |expert: u32, bias: f64, apart: f64| {
        let bias = array![bias, bias + apart, bias, bias];
        let ids = array![[ExpertId(expert)]];
        certify_grouped_choice(logits.view(), Some(bias.view()), &router, 1e-9, 1, ids.view()).is_ok()
    };
    for (bias, reach) in [(0.0, 2e-9), (1.0, 4e-9), (-1.0, 4e-9), (3.0, 8e-9)] {
        assert!(certified(1, bias, reach) && certified(0, bias, 0.9 * reach), "{bias}");
        assert!(!certified(0, bias, 1.1 * reach), "{bias}");
    }
}

#[test]
fn many_experts_are_chosen_from_the_same_with_any_number_of_threads() -> sonicmoe::Result<()> {
    let mut state = 1u32;
    let logits = Array2::from_shape_simple_fn((37, 4096), || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 20) as f32 / 128.0 // 4096 values over 4096 experts: ties everywhere
    });
    for k in [1, 2, 16, 64, 1000, 4095, 4096] {
        let [one, three] = [1, 3].map(|threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
            pool.install(|| top_k(logits.view(), k))
        });
        let one = one?;
        assert_eq!(one, three?);
        assert_eq!(certify_choice(logits.view(), k, one.ids()), Ok(()));
    }
    Ok(())
}

#[test]
fn strided_logits_are_read_by_their_strides() -> sonicmoe::Result<()> {
    let wide = Array2::from_shape_fn((6, 10), |(t, e)| ((t * 7 + e * 5) % 11) as f32);
    for logits in [wide.slice(s![..;2, 1..;3]), wide.slice(s![.., ..;-1]), wide.t()] {
        assert_eq!(top_k(logits, 2)?, top_k(logits.to_owned().view(), 2)?);
    }
    Ok(())
}

/// pytorch/torchtitan PR#3146.
#[test]
fn equal_logits_go_to_the_smaller_ids() -> sonicmoe::Result<()> {
    let equal = Array2::from_elem((1, 4), 0.25f32);
    assert_eq!(raw(top_k(equal.view(), 2)?.ids()), [[0, 1]]);
    // Expert 3 leads by 2⁻¹¹, which bf16 cannot hold beside 1.
    let close = array![[1.0f32, 1.0, 1.0, 1.0 + 1.0 / 2048.0]];
    assert_eq!(raw(top_k(close.view(), 2)?.ids()), [[3, 0]]);
    let in_bf16 = close.mapv(bf16::from_f32);
    assert_eq!(raw(top_k(in_bf16.mapv(bf16::to_f32).view(), 2)?.ids()), [[0, 1]]);
    assert_eq!(certify_choice(in_bf16.view(), 2, experts(&[[0, 1]]).view()), Ok(()));
    Ok(())
}

/// vllm-project/vllm PR#39391.
#[test]
fn a_row_that_allows_no_choice_is_an_error_that_names_it() {
    let refuse = |row: [f32; 4], message: &str| {
        let logits = array![[3.0, 2.0, 1.0, 0.0], [0.0; 4], row, [f32::NAN; 4]];
        let error = top_k(logits.view(), 2).expect_err(message);
        assert_eq!(error.to_string(), message);
        assert_eq!(error.class(), ErrorClass::Contract);
    };
    let must = "every logit must be a number below +∞ (−∞ masks an expert)";
    refuse([0.0, f32::NAN, 0.0, 0.0], &format!("logit of token 2, expert 1 is NaN; {must}"));
    refuse([9.0, 8.0, 7.0, f32::NAN], &format!("logit of token 2, expert 3 is NaN; {must}"));
    refuse([0.0, 0.0, 0.0, INF], &format!("logit of token 2, expert 3 is inf; {must}"));
    refuse(
        [-INF, -INF, 1.0, -INF],
        "token 2 has only 1 logits above −∞, but K = 2 experts have to be chosen; mask fewer experts",
    );
}

#[test]
fn zeros_of_either_sign_tie_and_masked_experts_are_never_chosen() -> sonicmoe::Result<()> {
    let logits = array![[-0.0f32, 0.0, -0.0, 0.0], [0.0, -0.0, 0.0, -0.0], [-INF, -3e38, -INF, -1e-45]];
    let choice = top_k(logits.view(), 2)?;
    assert_eq!(raw(choice.ids()), [[0, 1], [0, 1], [3, 1]]);
    assert_eq!(certify_choice(logits.view(), 2, choice.ids()), Ok(()));
    Ok(())
}

/// vllm-project/vllm PR#42608.
#[test]
fn k_may_be_e_and_not_more() -> sonicmoe::Result<()> {
    let logits = array![[0.0f32, 3.0, 1.0, 2.0]];
    assert_eq!(raw(top_k(logits.view(), 4)?.ids()), [[1, 3, 2, 0]]);
    for k in [0, 5, usize::MAX] {
        let message = format!("K = {k} experts per token were asked for, but there are only E = 4; choose 1 ≤ K ≤ E");
        assert_eq!(top_k(logits.view(), k).expect_err("refused").to_string(), message);
        assert_eq!(only(certify_choice(logits.view(), k, experts(&[[0]]).view())), Violation::TopK { k, experts: 4 });
    }
    assert!(top_k(Array2::<f32>::zeros((3, 0)).view(), 1).is_err(), "no experts");
    Ok(())
}

/// NVIDIA/TransformerEngine PR#3019.
#[test]
fn no_token_is_no_error() -> sonicmoe::Result<()> {
    let choice = top_k(Array2::<f32>::zeros((0, 4)).view(), 2)?;
    assert_eq!((choice.tokens(), choice.experts(), choice.k()), (0, 4, 2));
    assert_eq!(choice.routing().expert_offsets(), [0; 5]);
    assert_eq!(certify_choice(Array2::<f32>::zeros((0, 4)).view(), 2, choice.ids()), Ok(()));
    Ok(())
}

/// kekzl/imp PR#2056.
#[test]
fn expert_ids_do_not_wrap_at_256() -> sonicmoe::Result<()> {
    let mut logits = Array2::<f32>::zeros((3, 257));
    for (token, order) in [[0, 255, 256], [256, 0, 255], [255, 256, 0]].into_iter().enumerate() {
        for (rank, expert) in order.into_iter().enumerate() {
            logits[(token, expert)] = 3.0 - rank as f32;
        }
    }
    let choice = top_k(logits.view(), 3)?;
    assert_eq!(raw(choice.ids()), [[0, 255, 256], [256, 0, 255], [255, 256, 0]]);
    let routing = choice.routing();
    assert_eq!(routing.rows_of_expert(ExpertId(0)), 0..3);
    assert_eq!(routing.rows_of_expert(ExpertId(255)), 3..6);
    assert_eq!(routing.rows_of_expert(ExpertId(256)), 6..9);
    assert_eq!(routing.row_pair(), [0, 4, 8, 1, 5, 6, 2, 3, 7]);
    Ok(())
}

#[test]
fn a_choice_from_elsewhere_is_checked() {
    let error = |e, ids: Array2<ExpertId>| Choice::new(e, ids).expect_err("refused").to_string();
    assert_eq!(error(4, experts(&[[0, 1], [2, 4]])), "pair 3 names expert 4, but ids end at 4 (exclusive)");
    assert_eq!(
        error(4, experts(&[[0, 1], [2, 2]])),
        "token 1 is sent to expert 2 twice (pairs 2 and 3); a pair may appear once"
    );
    assert!(error(1, experts(&[[0, 1]])).starts_with("K = 2"));
    assert_eq!(
        error(4, experts(&[[0, 1, 2], [1, 2, 0], [3, 0, 2], [2, 3, 3]])),
        "token 3 is sent to expert 3 twice (pairs 10 and 11); a pair may appear once"
    );
    assert!(Choice::new(4, experts(&[[1, 0], [0, 1]])).is_ok());
    assert!(Choice::new(4, experts(&[[0, 1, 2], [1, 2, 0], [3, 0, 2]])).is_ok());
}

#[test]
fn the_certificate_names_each_kind_of_corruption() {
    let logits = array![[0.0f32, 5.0, 5.0, 2.0, -INF], [1.0, 2.0, 3.0, 4.0, 5.0]];
    assert_eq!(certify_choice(logits.view(), 3, experts(&[[1, 2, 3], [4, 3, 2]]).view()), Ok(()));
    let judge = |first: [u32; 3]| only(certify_choice(logits.view(), 3, experts(&[first, [4, 3, 2]]).view()));

    let of_array = "expert ids";
    assert_eq!(judge([1, 2, 2]), Violation::Duplicate { token: 0, expert: 2, first: 1, second: 2 });
    let of_second = only(certify_choice(logits.view(), 3, experts(&[[1, 2, 3], [4, 3, 3]]).view()));
    assert_eq!(of_second, Violation::Duplicate { token: 1, expert: 3, first: 4, second: 5 });
    assert_eq!(judge([1, 2, 9]), Violation::OutOfRange { array: of_array, at: 2, id: 9, limit: 5 });
    assert_eq!(judge([1, 2, u32::MAX]), Violation::OutOfRange { array: of_array, at: 2, id: 0xffff_ffff, limit: 5 });
    assert_eq!(judge([1, 2, 4]), Violation::Masked { token: 0, rank: 2, expert: 4 });
    assert_eq!(
        judge([1, 2, 0]),
        Violation::LeftOut { token: 0, rank: 2, chosen: 0, chosen_logit: 0.0, left_out: 3, left_out_logit: 2.0 }
    );
    let swapped =
        Violation::RankOrder { token: 0, rank: 0, earlier: 2, earlier_logit: 5.0, later: 1, later_logit: 5.0 };
    assert_eq!(judge([2, 1, 3]), swapped, "a tie goes to the smaller id");
    assert_eq!(
        swapped.to_string(),
        "token 0, rank 0: expert 2 (logit 5) stands before expert 1 (logit 5)",
        "a violation names its numbers"
    );
    assert_eq!(
        only(certify_choice(logits.view(), 2, experts(&[[1, 2, 3], [4, 3, 2]]).view())),
        Violation::Length { array: of_array, expected: 4, found: 6 }
    );

    let nan = array![[0.0f32, f32::NAN]];
    assert!(matches!(
        only(certify_choice(nan.view(), 1, experts(&[[0]]).view())),
        Violation::Number { array: "router_logits", token: 0, expert: 1, value } if value.is_nan()
    ));
    // The tie of experts 1 and 2 taken the other way round with K = 1.
    assert_eq!(
        only(certify_choice(logits.slice(s![..1, ..]), 1, experts(&[[2]]).view())),
        Violation::LeftOut { token: 0, rank: 0, chosen: 2, chosen_logit: 5.0, left_out: 1, left_out_logit: 5.0 }
    );
}

#[test]
fn within_an_error_any_optimal_choice_passes_and_no_worse_one() {
    let logits = array![[1.0f64, 1.1, 1.4, 3.0]];
    let within = Array2::from_elem((1, 4), 0.1);
    let judge = |ids| certify_choice_within(logits.view(), within.view(), 2, experts(&[ids]).view());
    assert_eq!(judge([3, 2]), Ok(()));
    assert_eq!(
        only(judge([3, 1])),
        Violation::LeftOut { token: 0, rank: 1, chosen: 1, chosen_logit: 1.1, left_out: 2, left_out_logit: 1.4 }
    );
    let wider = Array2::from_elem((1, 4), 0.16);
    let judge = |ids| certify_choice_within(logits.view(), wider.view(), 2, experts(&[ids]).view());
    assert_eq!(judge([3, 1]), Ok(()), "1.1 and 1.4 are nearer than 2·0.16");
    assert!(judge([3, 0]).is_err(), "1.0 and 1.4 are not");
    assert!(matches!(only(judge([2, 3])), Violation::RankOrder { earlier: 2, later: 3, .. }));
    // Each neighbour is within the error of the next; the first and the last are not.
    let chain = array![[1.0f64, 1.3, 1.6]];
    let wide = Array2::from_elem((1, 3), 0.16);
    assert!(certify_choice_within(chain.view(), wide.view(), 3, experts(&[[0, 1, 2]]).view()).is_err());
    assert_eq!(certify_choice_within(chain.view(), wide.view(), 3, experts(&[[1, 2, 0]]).view()), Ok(()));

    let narrow = Array2::from_elem((1, 2), 0.16);
    assert_eq!(
        only(certify_choice_within(chain.view(), narrow.view(), 1, experts(&[[2]]).view())),
        Violation::Length { array: "within", expected: 3, found: 2 }
    );
    let broken = array![[0.0, f64::NAN, -1.0]];
    assert_eq!(certify_choice_within(chain.view(), broken.view(), 1, experts(&[[2]]).view()).unwrap_err().len(), 2);
}
