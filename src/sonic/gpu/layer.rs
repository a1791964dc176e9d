//! A layer's weights on the device.

use std::collections::BTreeMap;
use std::sync::Arc;

use half::bf16;
use ndarray::{ArrayView, Dimension};

use crate::activation::Activation;
use crate::error::Error;
use crate::problem::Problem;

use super::compile::{KernelName, Variant};
use super::device::{Buffer, Device, Guards};
use super::tuning::{self, Tuning};

/// The weights of a layer on a device: parameters, which stay while the layer does.
pub struct Layer {
    device: Arc<Device>,
    guards: Guards,
    tuning: Tuning,
    activation: Activation,
    d: usize,
    n: usize,
    e: usize,
    w1: Buffer<bf16>,
    w2: Buffer<bf16>,
    biases: Option<(Buffer<bf16>, Buffer<bf16>)>,
}

/// Tokens times features of what is gathered end here: the kernels count 16-byte chunks with 32 bits.
const GATHERED_ELEMENTS: usize = 1 << 35;

impl Layer {
    /// Why the kernels cannot take `problem`, if they cannot.
    ///
    /// # Errors
    /// An activation without a kernel, d or n that is no multiple of 8 (rows are copied 16 bytes at a
    /// time), or sizes beyond the kernels' indices.
    pub fn accepts(problem: &Problem<'_, bf16>) -> crate::Result<()> {
        Self::takes(problem.activation(), [problem.d(), problem.n(), problem.e()], problem.t(), problem.routed())
    }

    fn takes(activation: Activation, [d, n, e]: [usize; 3], t: usize, routed: usize) -> crate::Result<()> {
        if !Activation::WITH_KERNELS.contains(&activation) {
            let known = Activation::WITH_KERNELS.map(Activation::name);
            return Err(Error::unknown("activation of the CUDA path", activation.name(), known));
        }
        for (what, size) in [("d", d), ("n", n)] {
            if !size.is_multiple_of(8) {
                return Err(Error::size(
                    what,
                    size,
                    "the CUDA kernels copy rows 16 bytes at a time: use a multiple of 8",
                ));
            }
        }
        let gathered = t.checked_mul(d).filter(|&elements| elements < GATHERED_ELEMENTS);
        if gathered.is_none() {
            return Err(Error::size(
                "T·d",
                t.saturating_mul(d),
                "the CUDA kernels gather from fewer than 2³⁵ elements",
            ));
        }
        let (width, columns) = (activation.h_width(n), d.max(activation.h_width(n)));
        let row_tiles = routed / 128 + e;
        let weight_tiles = e.saturating_mul(d.div_ceil(128)).saturating_mul(width.div_ceil(64));
        let tiles = row_tiles.saturating_mul(columns.div_ceil(64)).max(weight_tiles);
        if tiles > i32::MAX as usize || columns > i32::MAX as usize / 4 {
            return Err(Error::size("the number of output tiles", tiles, "the CUDA kernels count tiles up to 2³¹ − 1"));
        }
        Ok(())
    }

    /// Uploads the weights of `problem`; its kernels have the settings that are known to suit it.
    ///
    /// # Errors
    /// As [`Layer::accepts`]; or not enough device memory.
    pub fn upload(device: &Arc<Device>, problem: &Problem<'_, bf16>, guards: Guards) -> crate::Result<Self> {
        Self::accepts(problem)?;
        let biases = match (problem.b1(), problem.b2()) {
            (Some(b1), Some(b2)) => Some((upload(device, "b1", b1, guards)?, upload(device, "b2", b2, guards)?)),
            _ => None,
        };
        Ok(Self {
            device: Arc::clone(device),
            guards,
            tuning: tuning::for_layer(
                [problem.d(), problem.n(), problem.e()],
                problem.routed(),
                device.properties().multiprocessors,
            )?,
            activation: problem.activation(),
            d: problem.d(),
            n: problem.n(),
            e: problem.e(),
            w1: upload(device, "w1", problem.w1(), guards)?,
            w2: upload(device, "w2", problem.w2(), guards)?,
            biases,
        })
    }

    /// From weights that lie on the device: w1 (E, 2n, d) interleaved and w2 (E, d, n), without biases.
    ///
    /// # Errors
    /// Weights of other sizes, or widths that are no multiple of 8.
    pub fn of(
        device: &Arc<Device>,
        activation: Activation,
        [d, n, e]: [usize; 3],
        w1: Buffer<bf16>,
        w2: Buffer<bf16>,
        guards: Guards,
    ) -> crate::Result<Self> {
        Self::takes(activation, [d, n, e], 0, 0)?;
        for (name, buffer, rows, columns) in [("w1", &w1, activation.h_width(n), d), ("w2", &w2, d, n)] {
            if buffer.len() != e * rows * columns {
                let found = [buffer.len()];
                return Err(Error::shape(name, &[e, rows, columns], &found, "elements of another layer's weight"));
            }
        }
        Ok(Self {
            device: Arc::clone(device),
            guards,
            tuning: Tuning::new(),
            activation,
            d,
            n,
            e,
            w1,
            w2,
            biases: None,
        })
    }

    /// Whether the kernels' indices reach T tokens and R pairs, as [`Layer::accepts`].
    ///
    /// # Errors
    /// As there.
    pub fn accepts_tokens(&self, t: usize, routed: usize) -> crate::Result<()> {
        Self::takes(self.activation, [self.d, self.n, self.e], t, routed)
    }

    /// The same weights, with these kernels of other constants.
    pub fn tuned(mut self, tuning: Tuning) -> Self {
        self.tuning.extend(tuning);
        self
    }

    /// The same weights, with every kernel as its source has it.
    pub fn with_own_settings(self) -> Self {
        Self { tuning: Tuning::new(), ..self }
    }

    /// One kernel with other constants.
    pub(super) fn retune(&mut self, kernel: KernelName, constants: BTreeMap<&'static str, u32>) {
        self.tuning.insert(kernel, constants);
    }

    /// The form of `kernel` that this layer runs.
    pub fn variant(&self, kernel: KernelName) -> Variant {
        match self.tuning.get(&kernel) {
            Some(constants) => self.variant_with(kernel, constants),
            None => self.own_variant(kernel),
        }
    }

    /// The form of `kernel` that this layer would run with these constants.
    pub(super) fn variant_with(&self, kernel: KernelName, constants: &BTreeMap<&'static str, u32>) -> Variant {
        self.own_variant(kernel).with_all(constants)
    }

    fn own_variant(&self, kernel: KernelName) -> Variant {
        match kernel {
            KernelName::UpForward => Variant::up_forward(self.activation, self.biases.is_some()),
            KernelName::DownForward => Variant::down_forward(self.biases.is_some()),
            KernelName::DownBackwardActivation => Variant::down_backward_activation(self.activation),
            other => Variant::of(other),
        }
    }

    /// The kernels that a forward of this layer runs.
    pub fn forward_variants(&self) -> Vec<Variant> {
        [KernelName::UpForward, KernelName::DownForward, KernelName::CombineOutput].map(|k| self.variant(k)).to_vec()
    }

    /// The kernels that a backward of this layer runs.
    pub fn backward_variants(&self) -> Vec<Variant> {
        let bias = self.biases.is_some();
        let mut kernels = vec![
            KernelName::DownBackwardActivation,
            if bias { KernelName::BiasScoreGradient } else { KernelName::ScoreGradient },
            KernelName::DownBackwardWeight,
            KernelName::UpBackwardActivation,
            KernelName::UpBackwardWeight,
            KernelName::CombineInputGradient,
        ];
        if bias {
            kernels.extend([KernelName::UpBiasGradient, KernelName::DownBiasGradient]);
        }
        kernels.into_iter().map(|kernel| self.variant(kernel)).collect()
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// What is laid around and into buffers made for this layer.
    pub fn guards(&self) -> Guards {
        self.guards
    }

    /// The activation.
    pub fn activation(&self) -> Activation {
        self.activation
    }

    /// d, model width.
    pub fn d(&self) -> usize {
        self.d
    }

    /// n, expert width.
    pub fn n(&self) -> usize {
        self.n
    }

    /// E, experts.
    pub fn e(&self) -> usize {
        self.e
    }

    /// Columns of h: 2n with a gate, n without.
    pub fn h_width(&self) -> usize {
        self.activation.h_width(self.n)
    }

    /// w1 (E, 2n, d).
    pub fn w1(&self) -> &Buffer<bf16> {
        &self.w1
    }

    /// w2 (E, d, n).
    pub fn w2(&self) -> &Buffer<bf16> {
        &self.w2
    }

    /// b1 (E, 2n), with biases.
    pub fn b1(&self) -> Option<&Buffer<bf16>> {
        self.biases.as_ref().map(|(b1, _)| b1)
    }

    /// b2 (E, d), with biases.
    pub fn b2(&self) -> Option<&Buffer<bf16>> {
        self.biases.as_ref().map(|(_, b2)| b2)
    }

    /// Red zones and contents of every weight.
    ///
    /// # Errors
    /// A kernel wrote into or around one of them.
    pub fn check_untouched(&self) -> crate::Result<()> {
        let weights = [Some(&self.w1), Some(&self.w2), self.b1(), self.b2()];
        weights.into_iter().flatten().try_for_each(Buffer::check_untouched)
    }
}

/// Uploads a tensor, row-major.
///
/// # Errors
/// Not enough device memory.
pub fn upload<D: Dimension>(
    device: &Arc<Device>,
    name: &'static str,
    values: ArrayView<'_, bf16, D>,
    guards: Guards,
) -> crate::Result<Buffer<bf16>> {
    let standard = values.as_standard_layout();
    let values = standard.as_slice().ok_or_else(|| Error::internal(format!("`{name}` has no row-major layout")))?;
    Buffer::input(device, name, values, guards)
}
