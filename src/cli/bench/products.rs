//! Plain products, what a layer's speed is measured against.

use faer::{Accum, MatMut, MatRef};
use rayon::prelude::*;

use crate::element::Real;
use crate::shape::Shape;

/// The six products of a dense layer with R rows, one call per thread each, into memory that is
/// already there.
///
/// | | R×… | operations |
/// | --- | --- | --- |
/// | x W1ᵀ, dh W1, dhᵀ x | d, 2n | 4Rnd each |
/// | a W2ᵀ, dout W2, doutᵀ a′ | d, n | 2Rnd each |
pub(super) struct PlainProducts<A> {
    shape: Shape,
    threads: usize,
    left: Vec<A>,
    right: Vec<A>,
    product: Vec<A>,
}

/// A product's operand: rows × columns as they are read, and whether they are stored transposed.
#[derive(Clone, Copy)]
struct Operand {
    rows: usize,
    columns: usize,
    transposed: bool,
}

impl Operand {
    fn len(self) -> usize {
        self.rows * self.columns
    }

    fn of<A>(self, values: &[A]) -> MatRef<'_, A> {
        let Self { rows, columns, transposed } = self;
        let values = &values[..self.len()];
        if transposed {
            MatRef::from_column_major_slice(values, rows, columns)
        } else {
            MatRef::from_row_major_slice(values, rows, columns)
        }
    }
}

impl<A: Real> PlainProducts<A> {
    /// Operands are `values`, repeated.
    pub(super) fn new(shape: Shape, threads: usize, values: impl Iterator<Item = A> + Clone) -> Self {
        let products = Self::products(shape);
        let largest = |size: fn(&(Operand, Operand)) -> usize| products.iter().map(size).max().unwrap_or(0);
        let take = |length| values.clone().cycle().take(length).collect();
        Self {
            shape,
            threads,
            left: take(largest(|(left, _)| left.len())),
            right: take(largest(|(_, right)| right.len())),
            product: vec![A::one(); largest(|(left, right)| left.rows * right.columns)],
        }
    }

    fn products(shape: Shape) -> [(Operand, Operand); 6] {
        let (r, Shape { d, n, .. }) = (shape.routed(), shape);
        let plain = |rows, columns| Operand { rows, columns, transposed: false };
        let transposed = |rows, columns| Operand { rows, columns, transposed: true };
        [
            (plain(r, d), transposed(d, 2 * n)),
            (plain(r, n), transposed(n, d)),
            (plain(r, d), plain(d, n)),
            (transposed(d, r), plain(r, n)),
            (plain(r, 2 * n), plain(2 * n, d)),
            (transposed(2 * n, r), plain(r, d)),
        ]
    }

    /// Runs all six, the rows of each cut over the threads.
    pub(super) fn run(&mut self) {
        for (left, right) in Self::products(self.shape) {
            let (rows, columns) = (left.rows, right.columns);
            let share = rows.div_ceil(self.threads).max(1);
            let (left, right) = (left.of(&self.left), right.of(&self.right));
            self.product[..rows * columns].par_chunks_mut(share * columns).enumerate().for_each(|(part, product)| {
                let rows = product.len() / columns;
                let product = MatMut::from_row_major_slice_mut(product, rows, columns);
                A::multiply(product, Accum::Replace, left.subrows(part * share, rows), right);
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_six_products_have_18rnd_operations() {
        let shape: Shape = "5,7,3,4,2".parse().unwrap();
        let operations: usize =
            PlainProducts::<f32>::products(shape).iter().map(|(left, right)| 2 * left.len() * right.columns).sum();
        assert_eq!(operations, 18 * shape.routed() * shape.n * shape.d);
    }

    #[test]
    fn any_number_of_threads_computes_all_rows_of_the_last_product() {
        let shape: Shape = "5,7,3,4,2".parse().unwrap();
        for threads in [1, 3, 100] {
            let mut products = PlainProducts::new(shape, threads, [1.0f64, 2.0, 4.0].into_iter());
            products.run();
            // dhᵀ x: dh is (10, 6) and x (10, 7), both filled row after row.
            let at = |row: usize, column: usize, width: usize| [1.0, 2.0, 4.0][(row * width + column) % 3];
            for i in 0..6 {
                for j in 0..7 {
                    let exact: f64 = (0..10).map(|row| at(row, i, 6) * at(row, j, 7)).sum();
                    assert_eq!(products.product[i * 7 + j], exact, "{threads} threads, {i}, {j}");
                }
            }
        }
    }
}
