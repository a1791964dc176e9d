//! The median of numbers that nobody keeps.

/// So many numbers are kept, and their median is exact.
const KEPT: usize = 1 << 18;

/// Bins to a leading part of a number: its 16 first bits are its sign, its exponent, and 4 of its fraction.
const BINS: usize = 1 << 11;

/// The upper median of numbers ≥ 0: of many, to one part in 2¹⁵.
#[derive(Clone, Debug)]
pub(super) enum Median {
    /// The numbers.
    Kept(Vec<f64>),
    /// How many numbers begin with the same 27 bits. Their order is that of the numbers.
    Counted(Counts),
}

#[derive(Clone, Debug)]
pub(super) struct Counts(Vec<Option<Box<[u64; BINS]>>>);

impl Median {
    /// Of so many numbers at most.
    pub(super) fn of(numbers: usize) -> Self {
        if numbers <= KEPT { Self::Kept(Vec::new()) } else { Self::Counted(Counts::none()) }
    }

    /// Of the same kind, of nothing.
    pub(super) fn empty(&self) -> Self {
        match self {
            Self::Kept(_) => Self::Kept(Vec::new()),
            Self::Counted(_) => Self::Counted(Counts::none()),
        }
    }

    pub(super) fn extend(&mut self, numbers: impl Iterator<Item = f64>) {
        match self {
            Self::Kept(kept) => kept.extend(numbers),
            Self::Counted(counts) => numbers.for_each(|number| counts.add(number)),
        }
    }

    /// Adds the numbers of another of the same kind.
    pub(super) fn join(&mut self, other: Self) {
        match (self, other) {
            (Self::Kept(kept), Self::Kept(others)) => kept.extend(others),
            (Self::Counted(counts), Self::Counted(others)) => counts.join(others),
            (Self::Counted(counts), Self::Kept(others)) => others.into_iter().for_each(|number| counts.add(number)),
            (this @ Self::Kept(_), Self::Counted(mut counts)) => {
                if let Self::Kept(kept) = std::mem::replace(this, Self::Kept(Vec::new())) {
                    kept.into_iter().for_each(|number| counts.add(number));
                }
                *this = Self::Counted(counts);
            }
        }
    }

    /// NaN of nothing.
    pub(super) fn value(self) -> f64 {
        match self {
            Self::Kept(mut kept) => {
                let half = kept.len() / 2;
                if kept.is_empty() { f64::NAN } else { *kept.select_nth_unstable_by(half, f64::total_cmp).1 }
            }
            Self::Counted(counts) => counts.median(),
        }
    }
}

impl Counts {
    fn none() -> Self {
        Self(vec![None; 1 << 15])
    }

    fn add(&mut self, number: f64) {
        let bits = number.abs().to_bits() >> 37;
        let (leading, bin) = ((bits >> 11) as usize, bits as usize % BINS);
        self.0[leading].get_or_insert_with(|| Box::new([0; BINS]))[bin] += 1;
    }

    fn join(&mut self, others: Self) {
        for (counts, others) in self.0.iter_mut().zip(others.0) {
            match (&mut *counts, others) {
                (Some(counts), Some(others)) => {
                    counts.iter_mut().zip(others.iter()).for_each(|(count, other)| *count += other);
                }
                (None, others @ Some(_)) => *counts = others,
                (_, None) => {}
            }
        }
    }

    fn median(&self) -> f64 {
        let bins = || {
            let leading = self.0.iter().enumerate().filter_map(|(leading, bins)| Some((leading, bins.as_ref()?)));
            leading.flat_map(|(leading, bins)| {
                bins.iter().enumerate().map(move |(bin, &count)| ((leading << 11 | bin) as u64, count))
            })
        };
        let mut before = bins().map(|(_, count)| count).sum::<u64>() / 2;
        for (bits, count) in bins() {
            if before < count {
                return f64::from_bits(bits << 37);
            }
            before -= count;
        }
        f64::NAN
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn median_of(numbers: &[f64]) -> f64 {
        let mut all = Median::of(numbers.len());
        for piece in numbers.chunks(numbers.len() / 3 + 1) {
            let mut of_piece = all.empty();
            of_piece.extend(piece.iter().copied());
            all.join(of_piece);
        }
        all.value()
    }

    #[test]
    fn the_median_of_few_is_exact_and_that_of_many_is_to_one_part_in_2_to_the_15() {
        for count in [1, 2, 7, KEPT, 2 * KEPT + 7] {
            let numbers: Vec<f64> = (0..count).map(|place| ((place * 7919) % count + 1) as f64 * 1e-7).collect();
            let (found, median) = (median_of(&numbers), (count / 2 + 1) as f64 * 1e-7);
            let tolerance = if count <= KEPT { 0.0 } else { median / 32768.0 };
            assert!((median - tolerance..=median).contains(&found), "{found} of {count}, {median}");
        }
    }

    /// Kept and counted numbers, in either order.
    #[test]
    fn numbers_of_both_kinds_join_to_the_median_of_all() {
        let of = |counted: bool, numbers: &[f64]| {
            let mut median = Median::of(if counted { KEPT + 1 } else { 1 });
            median.extend(numbers.iter().copied());
            median
        };
        for (first, second) in [(false, false), (false, true), (true, false), (true, true)] {
            for (left, right) in
                [(&[1.0, 8.0, 9.0][..], &[2.0, 4.0][..]), (&[2.0], &[9.0, 4.0, 8.0, 1.0]), (&[4.0], &[])]
            {
                let mut all = of(first, left);
                all.join(of(second, right));
                assert_eq!(all.value(), 4.0, "{first} {left:?}, {second} {right:?}");
            }
        }
    }

    #[test]
    fn zeros_and_infinities_have_their_place_and_nothing_has_no_median() {
        let mut numbers = vec![0.0; KEPT];
        numbers.extend(vec![f64::INFINITY; KEPT + 2]);
        assert_eq!(median_of(&numbers), f64::INFINITY);
        numbers.truncate(2 * KEPT - 2);
        assert_eq!(median_of(&numbers), 0.0);
        assert!(median_of(&[]).is_nan());
        assert!(Median::of(KEPT + 1).value().is_nan());
    }
}
