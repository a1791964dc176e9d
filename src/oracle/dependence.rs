//! Whether statistics may judge: errors are independent only where the data are.
//!
//! [`statistic`](super::statistic) and [`bias`](super::bias) take the roundings of different numbers as
//! independent. They are not where numbers are equal: tokens that repeat each other (padding, a word
//! twice), a dout of ones (the loss was a sum), experts copied from one another. A correct engine
//! then exceeds six deviations (eight were seen with identical tokens), so a verdict on somebody's
//! numbers may rest on statistics only if no two lines of the inputs are equal. Bounds assume nothing,
//! and judge in any case.

use std::collections::HashMap;
use std::collections::hash_map::{DefaultHasher, Entry};
use std::hash::{Hash, Hasher};

use ndarray::{ArrayView1, ArrayView3, Axis};
use rayon::prelude::*;

use crate::problem::Problem;

/// What repeats in the inputs of a problem, if anything does: two equal rows of x, rows or columns of
/// dout, rows of w1 (a unit's gate or up) or columns of w2 (a unit), up to sign and powers of two, which
/// roundings do not see. Lines of zeros count in x alone; elsewhere they have no errors.
///
/// ```
/// use sonicmoe::case::Case;
/// use sonicmoe::oracle::dependence;
/// let problem = Case::new("20,16,24,3,2".parse()?).problem::<f64>()?;
/// assert_eq!(dependence::repetition(&problem), None);
/// # Ok::<(), sonicmoe::Error>(())
/// ```
pub fn repetition(problem: &Problem<'_, f64>) -> Option<String> {
    let (x, dout, w1, w2) = (problem.x(), problem.dout(), problem.w1(), problem.w2());
    let named = |what: &str, (first, second): (usize, usize)| format!("{what} {first} and {second} are equal");
    equal(x.axis_iter(Axis(0)).collect(), true)
        .map(|pair| named("x of tokens", pair))
        .or_else(|| equal(dout.axis_iter(Axis(0)).collect(), false).map(|pair| named("dout of tokens", pair)))
        .or_else(|| equal(dout.axis_iter(Axis(1)).collect(), false).map(|pair| named("columns of dout", pair)))
        .or_else(|| equal(lines(w1, 0), false).map(|pair| named("rows of w1, counted over experts,", pair)))
        .or_else(|| equal(lines(w2, 1), false).map(|pair| named("columns of w2, counted over experts,", pair)))
}

/// The lines of every expert's matrix along one axis, rows for 0.
fn lines(weights: ArrayView3<'_, f64>, axis: usize) -> Vec<ArrayView1<'_, f64>> {
    let (experts, lines) = (weights.len_of(Axis(0)), weights.len_of(Axis(1 + axis)));
    let places = (0..experts).flat_map(move |expert| (0..lines).map(move |line| (expert, line)));
    places.map(|(expert, line)| weights.index_axis_move(Axis(0), expert).index_axis_move(Axis(axis), line)).collect()
}

/// The first line that equals an earlier one, with that one.
fn equal(lines: Vec<ArrayView1<'_, f64>>, zeros_count: bool) -> Option<(usize, usize)> {
    let marks: Vec<Option<u64>> = lines.into_par_iter().map(|line| mark(line, zeros_count)).collect();
    let mut seen: HashMap<u64, usize> = HashMap::new();
    for (place, mark) in marks.into_iter().enumerate() {
        match mark.map(|mark| seen.entry(mark)) {
            Some(Entry::Occupied(first)) => return Some((*first.get(), place)),
            Some(Entry::Vacant(empty)) => _ = empty.insert(place),
            None => {}
        }
    }
    None
}

/// The same for lines that are equal up to sign and a power of two; none for a line that does not count.
fn mark(line: ArrayView1<'_, f64>, zeros_count: bool) -> Option<u64> {
    let leading = line.iter().copied().find(|&value| value != 0.0);
    // One number alone equals every other up to a power of two too easily to mean anything.
    if (leading.is_none() && !zeros_count) || line.len() < 2 {
        return None;
    }
    let scale = leading.map_or(1.0, |value| libm::ldexp(value.signum(), -libm::frexp(value).1));
    let mut hasher = DefaultHasher::new();
    // + 0 makes one zero of both.
    line.iter().for_each(|value| (value * scale + 0.0).to_bits().hash(&mut hasher));
    Some(hasher.finish())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::{Case, Pairing};
    use crate::problem::{Biases, Gating};
    use ndarray::{Array2, Array3, s};

    #[test]
    fn lines_are_equal_up_to_sign_power_of_two_and_the_sign_of_zeros() {
        let marked = |line: &[f64]| mark(ArrayView1::from(line), false);
        let line = marked(&[0.0, 1.5, -2.0]);
        assert!(line.is_some());
        for equal in [[-0.0, 1.5, -2.0], [0.0, -1.5, 2.0], [0.0, 3.0, -4.0], [-0.0, -0.375, 0.5]] {
            assert_eq!(marked(&equal), line, "{equal:?}");
        }
        for other in [[0.0, 1.5, 2.0], [0.0, 1.5, -2.5], [1.5, 0.0, -2.0]] {
            assert_ne!(marked(&other), line, "{other:?}");
        }
        assert_eq!((marked(&[0.0, -0.0]), marked(&[1.0])), (None, None));
        assert_eq!(mark(ArrayView1::from(&[0.0, -0.0]), true), mark(ArrayView1::from(&[0.0, 0.0]), true));
    }

    fn with(change: impl FnOnce(&mut Array2<f64>, &mut Array3<f64>, &mut Array2<f64>)) -> Option<String> {
        let case = Case::new("20,16,24,3,2".parse().unwrap()).with_pairing(Pairing::TopK);
        let drawn = case.problem::<f64>().unwrap();
        let (mut x, mut w1, mut dout) = (drawn.x().to_owned(), drawn.w1().to_owned(), drawn.dout().to_owned());
        change(&mut x, &mut w1, &mut dout);
        let biases = drawn.biases().map(Biases::borrowed);
        let gating = Gating::borrowed(drawn.gating());
        repetition(&Problem::new(x, w1, drawn.w2(), biases, gating, drawn.activation(), dout).unwrap())
    }

    /// A unit is a column of w2.
    #[test]
    fn a_unit_twice_is_found_and_units_of_zeros_repeat_nothing() {
        let case = Case::new("20,16,24,3,2".parse().unwrap()).with_pairing(Pairing::TopK);
        let drawn = case.problem::<f64>().unwrap();
        let with_w2 = |change: &dyn Fn(&mut Array3<f64>)| {
            let mut w2 = drawn.w2().to_owned();
            change(&mut w2);
            let gating = Gating::borrowed(drawn.gating());
            let (x, w1, dout) = (drawn.x(), drawn.w1(), drawn.dout());
            repetition(&Problem::new(x, w1, w2, None, gating, drawn.activation(), dout).unwrap())
        };
        let unit = with_w2(&|w2| {
            let first = &w2.slice(s![0, .., 5]) * -0.5;
            w2.slice_mut(s![2, .., 23]).assign(&first);
        });
        assert_eq!(unit.unwrap(), "columns of w2, counted over experts, 5 and 71 are equal");
        assert_eq!(with_w2(&|w2| w2.slice_mut(s![1, .., 3..5]).fill(0.0)), None);
        let rows = with_w2(&|w2| {
            let first = w2.slice(s![0, 5, ..]).to_owned();
            w2.slice_mut(s![2, 7, ..]).assign(&first);
        });
        assert_eq!(rows, None);
    }

    #[test]
    fn two_numbers_tell_a_line_and_one_does_not() {
        let lines = ndarray::arr2(&[[1.0, 2.0], [3.0, 1.0], [-2.0, -4.0]]);
        assert_eq!(equal(lines.axis_iter(Axis(0)).collect(), false), Some((0, 2)));
        assert_eq!(equal(lines.slice(s![.., ..1]).axis_iter(Axis(0)).collect(), true), None);
    }

    #[test]
    fn drawn_data_repeat_nothing() {
        assert_eq!(with(|_, _, _| {}), None);
    }

    /// Lines of zeros have no error that could add up; two tokens of zeros are one token twice, though.
    #[test]
    fn lines_of_zeros_repeat_nothing_but_tokens_of_zeros_do() {
        assert_eq!(with(|_, _, dout| dout.slice_mut(s![3..5, ..]).fill(0.0)), None);
        assert_eq!(with(|_, _, dout| dout.slice_mut(s![.., 3..5]).fill(0.0)), None);
        assert_eq!(with(|_, w1, _| w1.slice_mut(s![1, 3..5, ..]).fill(0.0)), None);
        let zeros = with(|x, _, _| x.slice_mut(s![3..5, ..]).fill(0.0));
        assert_eq!(zeros.unwrap(), "x of tokens 3 and 4 are equal");
    }

    #[test]
    fn a_token_twice_a_dout_of_ones_and_a_copied_expert_are_found() {
        let token = with(|x, _, _| {
            let row = &x.row(3) * -4.0;
            x.row_mut(17).assign(&row);
        });
        assert_eq!(token.unwrap(), "x of tokens 3 and 17 are equal");
        assert_eq!(with(|_, _, dout| dout.fill(1.0)).unwrap(), "dout of tokens 0 and 1 are equal");
        let column = with(|_, _, dout| {
            let column = dout.column(2).to_owned();
            dout.column_mut(9).assign(&column);
        });
        assert_eq!(column.unwrap(), "columns of dout 2 and 9 are equal");
        let expert = with(|_, w1, _| {
            let first = w1.slice(s![0, .., ..]).to_owned();
            w1.slice_mut(s![2, .., ..]).assign(&first);
        });
        assert_eq!(expert.unwrap(), "rows of w1, counted over experts, 0 and 96 are equal");
    }
}
