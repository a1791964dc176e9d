//! The operations of a tape, each beside its derivative. Nothing here knows about experts, and
//! every composite (activation, softmax, layer) gets its derivative from these alone.
//!
//! g is the gradient in the result. The list after the result names what the derivative reads, and
//! so what stays in memory until the sweep.

use ndarray::{Array2, ArrayView2, Axis, Zip, s};

use super::tape::{Indices, Role, Tape, Var};
use crate::element::{Element, Real};

/// Products and sums of matrices.
impl<A: Real> Tape<'_, A> {
    /// a·bᵀ for a (m, k) and b (n, k); da = g·b, db = gᵀ·a.
    ///
    /// # Panics
    /// If the widths differ.
    #[track_caller]
    pub fn product(&mut self, a: Var, b: Var) -> Var {
        let value = self.value(a).dot(&self.value(b).t());
        self.record("product", value, &[a, b], &[], move |tape, g, sweep| {
            sweep.add(a, g.dot(&tape.value(b)));
            sweep.add(b, g.t().dot(&tape.value(a)));
        })
    }

    /// a + b; da = db = g.
    ///
    /// # Panics
    /// If the shapes differ.
    #[track_caller]
    pub fn add(&mut self, a: Var, b: Var) -> Var {
        self.same_shape(a, b);
        let value = &self.value(a) + &self.value(b);
        self.record("sum", value, &[], &[], move |_, g, sweep| {
            sweep.add(a, g.clone());
            sweep.add(b, g);
        })
    }

    /// a (m, n) plus a row (1, n) on each of its rows; da = g, drow = Σ_i g_i.
    ///
    /// # Panics
    /// If `row` is no row of that width.
    #[track_caller]
    pub fn add_row(&mut self, a: Var, row: Var) -> Var {
        assert_eq!(self.shape(row), (1, self.shape(a).1), "one row as wide as the matrix");
        let value = &self.value(a) + &self.value(row);
        self.record("sum with row", value, &[], &[], move |_, g, sweep| {
            sweep.add(row, g.sum_axis(Axis(0)).insert_axis(Axis(0)));
            sweep.add(a, g);
        })
    }

    /// a (m, n) minus a constant (m, 1) along each row; da = g.
    ///
    /// # Panics
    /// If `constant` is no column of that height.
    #[track_caller]
    pub fn shift_rows(&mut self, a: Var, constant: &Array2<A>) -> Var {
        assert_eq!(constant.dim(), (self.shape(a).0, 1), "one constant per row");
        let value = &self.value(a) - constant;
        self.record("shifted rows", value, &[], &[], move |_, g, sweep| sweep.add(a, g))
    }

    /// The sum of each row, (m, 1); da_ij = g_i.
    pub fn row_sums(&mut self, a: Var) -> Var {
        let value = self.value(a).sum_axis(Axis(1)).insert_axis(Axis(1));
        self.record("row sums", value, &[], &[], move |_, g, sweep| {
            let into = sweep.at(a);
            *into += &g;
        })
    }

    #[track_caller]
    fn same_shape(&self, a: Var, b: Var) {
        assert_eq!(self.shape(a), self.shape(b), "element-wise operations take equal shapes");
    }
}

/// Products and quotients element by element and row by row.
impl<A: Real> Tape<'_, A> {
    /// a∘b; da = g∘b, db = g∘a.
    ///
    /// # Panics
    /// If the shapes differ.
    #[track_caller]
    pub fn mul(&mut self, a: Var, b: Var) -> Var {
        self.same_shape(a, b);
        let value = &self.value(a) * &self.value(b);
        self.record("product by element", value, &[a, b], &[], move |tape, g, sweep| {
            sweep.add(a, &g * &tape.value(b));
            sweep.add(b, g * tape.value(a));
        })
    }

    /// q = a/b; da = g/b, db = −g∘q/b.
    ///
    /// # Panics
    /// If the shapes differ.
    #[track_caller]
    pub fn div(&mut self, a: Var, b: Var) -> Var {
        self.same_shape(a, b);
        let value = &self.value(a) / &self.value(b);
        let quotient = self.next();
        self.record("quotient", value, &[b, quotient], &[], move |tape, g, sweep| {
            sweep.add(a, &g / &tape.value(b));
            sweep.add(b, -(g * tape.value(quotient) / tape.value(b)));
        })
    }

    /// c·a for a constant c; da = c·g.
    pub fn scale(&mut self, a: Var, factor: A) -> Var {
        let value = self.value(a).mapv(|a| factor * a);
        self.record("multiple", value, &[], &[], move |_, g, sweep| sweep.add(a, g.mapv_into(|g| factor * g)))
    }

    /// Row i of a (m, n) times s_i, s (m, 1); da_i = s_i·g_i, ds_i = ⟨g_i, a_i⟩.
    ///
    /// # Panics
    /// If `s` is no column of that height.
    #[track_caller]
    pub fn scale_rows(&mut self, a: Var, s: Var) -> Var {
        assert_eq!(self.shape(s), (self.shape(a).0, 1), "one factor per row");
        let value = &self.value(a) * &self.value(s);
        self.record("scaled rows", value, &[a, s], &[], move |tape, g, sweep| {
            sweep.add(s, (&g * &tape.value(a)).sum_axis(Axis(1)).insert_axis(Axis(1)));
            sweep.add(a, g * tape.value(s));
        })
    }

    /// q: row i of a (m, n) divided by s_i, s (m, 1); da_i = g_i/s_i, ds_i = −⟨g_i, q_i⟩/s_i.
    ///
    /// # Panics
    /// If `s` is no column of that height.
    #[track_caller]
    pub fn divide_rows(&mut self, a: Var, s: Var) -> Var {
        assert_eq!(self.shape(s), (self.shape(a).0, 1), "one divisor per row");
        let value = &self.value(a) / &self.value(s);
        let quotient = self.next();
        self.record("divided rows", value, &[s, quotient], &[], move |tape, g, sweep| {
            let along = (&g * &tape.value(quotient)).sum_axis(Axis(1)).insert_axis(Axis(1));
            sweep.add(s, -(along / tape.value(s)));
            sweep.add(a, g / tape.value(s));
        })
    }
}

/// Functions of one element.
impl<A: Real> Tape<'_, A> {
    /// e = exp(a); da = g∘e.
    pub fn exp(&mut self, a: Var) -> Var {
        let value = self.value(a).mapv(A::exp);
        let result = self.next();
        self.record("exp", value, &[result], &[], move |tape, g, sweep| sweep.add(a, g * tape.value(result)))
    }

    /// σ(a) = 1/(1 + e⁻ᵃ); da = g∘σ(a)∘σ(−a). Neither overflows for any a, and 1 − σ is computed as
    /// σ(−a), which loses nothing where σ is close to 1.
    pub fn sigmoid(&mut self, a: Var) -> Var {
        let value = self.value(a).mapv(sigmoid);
        self.record("sigmoid", value, &[a], &[], move |tape, mut g, sweep| {
            Zip::from(&mut g).and(tape.value(a)).for_each(|g, &a| *g *= sigmoid(a) * sigmoid(-a));
            sweep.add(a, g);
        })
    }

    /// erfc(a) = 1 − erf(a), accurate where erf is close to 1; da = −2/√π·exp(−a²)∘g.
    pub fn erfc(&mut self, a: Var) -> Var {
        let value = self.value(a).mapv(|a| A::from_f64(libm::erfc(Element::to_f64(a))));
        let slope = A::from_f64(-std::f64::consts::FRAC_2_SQRT_PI);
        self.record("erfc", value, &[a], &[], move |tape, mut g, sweep| {
            Zip::from(&mut g).and(tape.value(a)).for_each(|g, &a| *g *= slope * (-(a * a)).exp());
            sweep.add(a, g);
        })
    }

    /// c = a within [low, high]; da = g where low ≤ a ≤ high, else 0. NaN stays NaN.
    pub fn clamp(&mut self, a: Var, low: A, high: A) -> Var {
        let clamped = move |a| {
            if a < low {
                low
            } else if a > high {
                high
            } else {
                a
            }
        };
        let value = self.value(a).mapv(clamped);
        self.record("clamp", value, &[a], &[], move |tape, mut g, sweep| {
            Zip::from(&mut g).and(tape.value(a)).for_each(|g, &a| {
                if a < low || a > high {
                    *g = A::zero();
                }
            });
            sweep.add(a, g);
        })
    }

    /// m = max(a, 0); da = g where a > 0, else 0. NaN stays NaN.
    pub fn relu(&mut self, a: Var) -> Var {
        let value = self.value(a).mapv(|a| if a <= A::zero() { A::zero() } else { a });
        let result = self.next();
        self.record("relu", value, &[result], &[], move |tape, mut g, sweep| {
            Zip::from(&mut g).and(tape.value(result)).for_each(|g, &m| {
                if m <= A::zero() {
                    *g = A::zero();
                }
            });
            sweep.add(a, g);
        })
    }
}

/// Selections, and the sums that undo them.
impl<A: Real> Tape<'_, A> {
    /// Columns `start`, `start + step`, …; da has g in them.
    ///
    /// # Panics
    /// If `start` is past the last column, or `step` is 0.
    #[track_caller]
    pub fn columns(&mut self, a: Var, start: usize, step: usize) -> Var {
        let value = self.value(a).slice(s![.., start..;step]).to_owned();
        self.record("columns", value, &[], &[], move |_, g, sweep| {
            let mut into = sweep.at(a).slice_mut(s![.., start..;step]);
            into += &g;
        })
    }

    /// Element (rows_i, columns_i) for each i, as a column; da has g_i added there.
    ///
    /// # Panics
    /// If the lists differ in length, or an element does not exist.
    #[track_caller]
    pub fn pick(&mut self, a: Var, rows: &Indices, columns: &Indices) -> Var {
        assert_eq!(rows.len(), columns.len(), "one column per row");
        let from = self.value(a);
        let value = Array2::from_shape_fn((rows.len(), 1), |(i, _)| from[[rows[i], columns[i]]]);
        let (at_rows, at_columns) = (rows.clone(), columns.clone());
        self.record("picked elements", value, &[], &[rows, columns], move |_, g, sweep| {
            let into = sweep.at(a);
            for ((&row, &column), &g) in at_rows.iter().zip(at_columns.iter()).zip(&g) {
                into[[row, column]] += g;
            }
        })
    }

    /// Row rows_i of a for each i; g's rows are added to da where they came from.
    ///
    /// # Panics
    /// If a row does not exist.
    #[track_caller]
    pub fn gather_rows(&mut self, a: Var, rows: &Indices) -> Var {
        let value = self.value(a).select(Axis(0), rows);
        let gathered = rows.clone();
        self.record("gathered rows", value, &[], &[rows], move |_, g, sweep| {
            add_rows(sweep.at(a), g.view(), &gathered);
        })
    }

    /// A matrix of `shape`, zero but for row i of each part added to its row rows_i; the gradient of
    /// a part is g's rows, gathered.
    ///
    /// # Panics
    /// If a part's list is not as long as the part, a row does not exist, or the widths differ.
    #[track_caller]
    pub fn scatter_add_rows(&mut self, shape: (usize, usize), parts: &[(Var, Indices)]) -> Var {
        let mut value = Array2::zeros(shape);
        for (part, rows) in parts {
            assert_eq!(self.shape(*part), (rows.len(), shape.1), "one target per row, of the same width");
            add_rows(&mut value, self.value(*part), rows);
        }
        let targets: Vec<&Indices> = parts.iter().map(|(_, rows)| rows).collect();
        let scattered = parts.to_vec();
        self.record("scattered sums", value, &[], &targets, move |_, g, sweep| {
            for (part, rows) in &scattered {
                sweep.add(*part, g.select(Axis(0), rows));
            }
        })
    }
}

/// Memory traded for work.
impl<A: Real> Tape<'_, A> {
    /// `function` of a, of which only a is kept: the sweep runs `function` again, on a tape of its
    /// own, and sweeps that.
    pub fn checkpoint(&mut self, a: Var, function: impl for<'t> Fn(&mut Tape<'t, A>, Var) -> Var + 'static) -> Var {
        let value = {
            let mut inner = Tape::new();
            let input = inner.leaf("input", self.value(a), Role::Activation);
            let result = function(&mut inner, input);
            inner.value(result).to_owned()
        };
        self.record("checkpoint", value, &[a], &[], move |tape, g, sweep| {
            let mut inner = Tape::new();
            let input = inner.leaf("input", tape.value(a), Role::Activation);
            let result = function(&mut inner, input);
            sweep.add(a, inner.backward(result, g, &[]).take(input));
        })
    }
}

/// σ without an exponential of a positive number.
pub(super) fn sigmoid<A: Real>(a: A) -> A {
    if a >= A::zero() {
        A::one() / (A::one() + (-a).exp())
    } else {
        let e = a.exp();
        e / (A::one() + e)
    }
}

/// Adds row i of `from` to row `rows[i]` of `into`.
fn add_rows<A: Real>(into: &mut Array2<A>, from: ArrayView2<'_, A>, rows: &[usize]) {
    for (row, &target) in from.rows().into_iter().zip(rows) {
        let mut into = into.row_mut(target);
        into += &row;
    }
}
