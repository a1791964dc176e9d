//! The graph, the backward sweep, and what is kept in between.
//!
//! A [`Tape`] computes matrices as they are asked for and notes, for each, how a gradient in it
//! becomes gradients in its inputs. Every note names the values that it will read; [`Tape::release`]
//! drops all others, and what remains is what [`Tape::ledger`] lists. An operation that read a
//! value it had not named would find it gone, so the ledger cannot claim less than is held.

use std::borrow::Cow;
use std::rc::Rc;

use ndarray::{Array2, ArrayView2, CowArray, Ix2};

use crate::element::Real;
use crate::engine::{Keeping, Ledger};

/// Row or column numbers that an operation and its derivative read; shared, never copied.
pub type Indices = Rc<[usize]>;

/// A matrix on a tape. Belongs to the tape that made it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Var(usize);

/// How a matrix on the tape is accounted for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A weight: whoever owns the layer holds it anyway, so the ledger leaves it out.
    Parameter,
    /// An activation. What an operation makes is one unless [`Tape::record_as`] says otherwise.
    Activation,
    /// Scores, logits, and what leads to them.
    Metadata,
}

type Pullback<A> = Box<dyn Fn(&Tape<'_, A>, Array2<A>, &mut Sweep<A>)>;

struct Node<'p, A: Real> {
    shape: (usize, usize),
    /// None once released.
    value: Option<CowArray<'p, A, Ix2>>,
    name: Cow<'static, str>,
    role: Role,
    pinned: bool,
    /// Whose values the pullback reads.
    reads: Vec<Var>,
    /// Which index lists the pullback reads.
    indices: Vec<Indices>,
    /// None for a leaf.
    pullback: Option<Pullback<A>>,
}

/// A record of matrix operations that can be swept backward, any number of times.
///
/// ```
/// use ndarray::array;
/// use sonicmoe::reference::tape::{Role, Tape};
///
/// let (a, b) = (array![[2.0, 3.0]], array![[5.0, 7.0]]);
/// let mut tape = Tape::<f64>::new();
/// let a = tape.leaf("a", a.view(), Role::Activation);
/// let b = tape.leaf("b", b.view(), Role::Parameter);
/// let product = tape.mul(a, b);
/// tape.release();
/// let mut gradients = tape.backward(product, array![[1.0, 10.0]], &[]);
/// assert_eq!(gradients.take(a), array![[5.0, 70.0]]);
/// assert_eq!(gradients.take(b), array![[2.0, 30.0]]);
/// assert_eq!(tape.ledger().activations(), 2 * size_of::<f64>()); // a; b is a parameter
/// ```
pub struct Tape<'p, A: Real> {
    nodes: Vec<Node<'p, A>>,
    /// What newly recorded results count as.
    role: Role,
}

impl<A: Real> Default for Tape<'_, A> {
    fn default() -> Self {
        Self::new()
    }
}

impl<'p, A: Real> Tape<'p, A> {
    /// An empty tape.
    pub fn new() -> Self {
        Self { nodes: Vec::new(), role: Role::Activation }
    }

    /// A matrix that comes from outside, owned or borrowed. Gradients end here.
    pub fn leaf(
        &mut self,
        name: impl Into<Cow<'static, str>>,
        value: impl Into<CowArray<'p, A, Ix2>>,
        role: Role,
    ) -> Var {
        let value = value.into();
        let var = self.next();
        self.nodes.push(Node {
            shape: value.dim(),
            value: Some(value),
            name: name.into(),
            role,
            pinned: true,
            reads: Vec::new(),
            indices: Vec::new(),
            pullback: None,
        });
        var
    }

    /// Notes the result of an operation: `pullback` adds to the gradients of the inputs, given the
    /// gradient in the result, and may read the values of `reads` and no others.
    pub(super) fn record(
        &mut self,
        name: &'static str,
        value: Array2<A>,
        reads: &[Var],
        indices: &[&Indices],
        pullback: impl Fn(&Tape<'_, A>, Array2<A>, &mut Sweep<A>) + 'static,
    ) -> Var {
        let var = self.next();
        self.nodes.push(Node {
            shape: value.dim(),
            value: Some(value.into()),
            name: name.into(),
            role: self.role,
            pinned: false,
            reads: reads.to_vec(),
            indices: indices.iter().map(|&list| Rc::clone(list)).collect(),
            pullback: Some(Box::new(pullback)),
        });
        var
    }

    /// The variable that the next operation will make: for pullbacks that read their own result.
    pub(super) fn next(&self) -> Var {
        Var(self.nodes.len())
    }

    /// What the results of the operations from here on count as.
    pub fn record_as(&mut self, role: Role) {
        self.role = role;
    }

    /// Names a matrix for the ledger.
    ///
    /// # Panics
    /// If `var` is of another tape.
    #[track_caller]
    pub fn label(&mut self, var: Var, name: impl Into<Cow<'static, str>>) {
        self.nodes[var.0].name = name.into();
    }

    /// Keeps a value over [`Tape::release`] although no derivative may need it.
    ///
    /// # Panics
    /// If `var` is of another tape.
    #[track_caller]
    pub fn pin(&mut self, var: Var) {
        self.nodes[var.0].pinned = true;
    }

    /// (rows, columns).
    ///
    /// # Panics
    /// If `var` is of another tape.
    #[track_caller]
    pub fn shape(&self, var: Var) -> (usize, usize) {
        self.nodes[var.0].shape
    }

    /// The value of a matrix.
    ///
    /// # Panics
    /// If it has been released or taken, or `var` is of another tape.
    #[track_caller]
    pub fn value(&self, var: Var) -> ArrayView2<'_, A> {
        match &self.nodes[var.0].value {
            Some(value) => value.view(),
            None => {
                panic!("the value of `{}` was released; pin it, or name it among the reads", self.nodes[var.0].name)
            }
        }
    }

    /// Moves a value out of the tape.
    ///
    /// # Panics
    /// If a derivative reads it, if it has been released or taken, or `var` is of another tape.
    #[track_caller]
    pub fn take(&mut self, var: Var) -> Array2<A> {
        let name = &self.nodes[var.0].name;
        assert!(!self.nodes.iter().any(|node| node.reads.contains(&var)), "a derivative reads `{name}`; copy it");
        match self.nodes[var.0].value.take() {
            Some(value) => value.into_owned(),
            None => panic!("the value of `{}` was released", self.nodes[var.0].name),
        }
    }

    /// Ends the forward part: drops every value that no derivative reads. Leaves stay, and so do
    /// pinned values.
    pub fn release(&mut self) {
        let mut held: Vec<bool> = self.nodes.iter().map(|node| node.pinned).collect();
        for read in self.nodes.iter().flat_map(|node| &node.reads) {
            held[read.0] = true;
        }
        for (node, held) in self.nodes.iter_mut().zip(held) {
            if !held {
                node.value = None;
            }
        }
    }

    /// What the tape holds, matrix by matrix and index list by index list, parameters left out.
    pub fn ledger(&self) -> Ledger {
        let mut ledger = Ledger::default();
        let mut listed: Vec<*const usize> = Vec::new();
        for node in &self.nodes {
            if let Some(value) = &node.value {
                let bytes = value.len() * size_of::<A>();
                match node.role {
                    Role::Parameter => {}
                    Role::Activation => ledger.keep(node.name.clone(), bytes, Keeping::Activation),
                    Role::Metadata => ledger.keep(node.name.clone(), bytes, Keeping::Metadata),
                }
            }
            for list in &node.indices {
                if !listed.contains(&list.as_ptr()) {
                    listed.push(list.as_ptr());
                    ledger.keep(format!("{} indices", node.name), size_of_val(&list[..]), Keeping::Metadata);
                }
            }
        }
        ledger
    }

    /// Gradients of ⟨`seed`, `output`⟩ in every leaf, and in the `watched` matrices between.
    ///
    /// # Panics
    /// If `seed` has another shape than `output`, or a variable is of another tape.
    #[track_caller]
    pub fn backward(&self, output: Var, seed: Array2<A>, watched: &[Var]) -> Sweep<A> {
        let mut stays = vec![false; self.nodes.len()];
        for var in watched {
            stays[var.0] = true;
        }
        let shapes = self.nodes.iter().map(|node| node.shape).collect();
        let mut sweep = Sweep { shapes, gradients: self.nodes.iter().map(|_| None).collect() };
        sweep.add(output, seed);
        // Operations only read what came before them, so by the time a node is reached its
        // gradient is complete.
        for index in (0..=output.0).rev() {
            let Some(pullback) = &self.nodes[index].pullback else { continue };
            let gradient = if stays[index] { sweep.gradients[index].clone() } else { sweep.gradients[index].take() };
            if let Some(gradient) = gradient {
                pullback(self, gradient, &mut sweep);
            }
        }
        sweep
    }
}

/// The gradients of one backward sweep.
pub struct Sweep<A> {
    shapes: Vec<(usize, usize)>,
    /// None where no gradient has arrived: zero.
    gradients: Vec<Option<Array2<A>>>,
}

impl<A: Real> Sweep<A> {
    /// Adds to the gradient of `var`.
    #[track_caller]
    pub(super) fn add(&mut self, var: Var, gradient: Array2<A>) {
        assert_eq!(gradient.dim(), self.shapes[var.0], "a gradient has the shape of its matrix");
        match &mut self.gradients[var.0] {
            Some(sum) => *sum += &gradient,
            empty => *empty = Some(gradient),
        }
    }

    /// The gradient of `var`, for adding to a part of it.
    pub(super) fn at(&mut self, var: Var) -> &mut Array2<A> {
        let shape = self.shapes[var.0];
        self.gradients[var.0].get_or_insert_with(|| Array2::zeros(shape))
    }

    /// Moves out the gradient of a leaf or a watched matrix: +0 throughout where none arrived.
    ///
    /// # Panics
    /// If `var` is of another tape.
    #[track_caller]
    pub fn take(&mut self, var: Var) -> Array2<A> {
        let shape = self.shapes[var.0];
        self.gradients[var.0].take().unwrap_or_else(|| Array2::zeros(shape))
    }
}
