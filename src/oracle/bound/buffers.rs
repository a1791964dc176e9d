//! Memory of arrays that are gone, for those to come.
//!
//! The system clears every page that it hands out, one fault each: for an array that is written once and
//! read once that takes as long as its arithmetic.

use std::sync::{Mutex, PoisonError};

use ndarray::Array2;

use crate::element::Real;

/// Buffers that several threads take and give.
#[derive(Debug, Default)]
pub(crate) struct Buffers {
    pub(super) wide: Pool<f64>,
    pub(super) narrow: Pool<f32>,
    /// Of radii where there are none: 0 throughout.
    zeros: Pool<f64>,
}

/// Buffers of one type.
#[derive(Debug)]
pub(super) struct Pool<A>(Mutex<Vec<Vec<A>>>);

impl<A> Default for Pool<A> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<A: Real> Pool<A> {
    /// How many times an array may go into the buffer that it takes: what is over is nobody else's.
    const SPARE: usize = 4;

    /// Smaller arrays come from the allocator as fast.
    const LEAST: usize = 512;

    /// So many numbers, whatever they are.
    pub(super) fn take(&self, length: usize) -> Vec<A> {
        match (length >= Self::LEAST).then(|| self.near(length)).flatten() {
            Some(mut buffer) => {
                buffer.resize(length, A::zero());
                buffer
            }
            None => A::zeros(length),
        }
    }

    /// The smallest that holds so many; or else the largest, if it need not grow by much.
    fn near(&self, length: usize) -> Option<Vec<A>> {
        let mut free = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let sizes = || free.iter().map(Vec::capacity).enumerate();
        let holds = sizes().filter(|(_, size)| (length..=Self::SPARE * length).contains(size));
        let grows = || sizes().filter(|&(_, size)| size < length && length <= 2 * size);
        let (at, _) = holds.min_by_key(|&(_, size)| size).or_else(|| grows().max_by_key(|&(_, size)| size))?;
        Some(free.swap_remove(at))
    }

    /// A matrix of whatever numbers.
    pub(super) fn matrix(&self, (rows, columns): (usize, usize)) -> Array2<A> {
        Array2::from_shape_vec((rows, columns), self.take(rows * columns))
            .unwrap_or_else(|_| Array2::zeros((rows, columns)))
    }

    fn clear(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Takes back the memory of an array.
    pub(super) fn give(&self, array: Array2<A>) {
        let buffer = array.into_raw_vec_and_offset().0;
        if buffer.capacity() >= Self::LEAST {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).push(buffer);
        }
    }
}

impl Buffers {
    /// A copy of a matrix, row after row.
    pub(super) fn copy(&self, from: &Array2<f64>) -> Array2<f64> {
        let mut copy = self.wide.matrix(from.dim());
        copy.assign(from);
        copy
    }

    /// A matrix of zeros, to which nothing else may be written.
    pub(super) fn zeros(&self, dim: (usize, usize)) -> Array2<f64> {
        self.zeros.matrix(dim)
    }

    /// Takes it back.
    pub(super) fn give_zeros(&self, zeros: Array2<f64>) {
        debug_assert!(zeros.iter().all(|&zero| zero == 0.0), "midpoints have no radii");
        self.zeros.give(zeros);
    }

    /// Gives all memory back to the system.
    pub(crate) fn clear(&self) {
        [&self.wide, &self.zeros].into_iter().for_each(Pool::clear);
        self.narrow.clear();
    }

    /// Takes back the memory of an array that nobody reads any more.
    pub(crate) fn give(&self, array: Array2<f64>) {
        self.wide.give(array);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_given_is_taken_by_arrays_of_about_its_size() {
        let pool = Pool::<f64>::default();
        let place = |array: &Array2<f64>| array.as_ptr();
        let [large, small] = [(1000, 10), (1000, 3)].map(|dim| pool.matrix(dim));
        let places = [&large, &small].map(place);
        pool.give(large);
        pool.give(small);
        let [again, less] = [(3000, 1), (200, 20)].map(|dim| pool.matrix(dim));
        assert_eq!([&less, &again].map(place), places);
        pool.give(again);
        // One that holds 3000 numbers grows to 5000, but not to 10000, and none of 3000 is spent on 600.
        assert_eq!(pool.take(10_000), [0.0; 10_000]);
        assert_eq!(pool.take(600), [0.0; 600]);
        assert_eq!(pool.take(5000).len(), 5000);
        assert!(pool.near(3000).is_none());
    }
}
