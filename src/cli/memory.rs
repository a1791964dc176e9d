//! `sonicmoe memory`: what a layer keeps from forward to backward, beside other systems.

use clap::Args;

use crate::activation::Activation;
use crate::element::DType;
use crate::oracle::memory::{Layer, System};
use crate::report::{Align, Table, size};
use crate::shape::Shape;

/// Prints the activation memory of a layer of any size; nothing is allocated.
#[derive(Args, Debug)]
#[command(after_help = "\
Example: the layer of the paper's 7B model
  sonicmoe memory --shape 24576,1536,256,128,8

`kept` is what stays between forward and backward. SonicMoE keeps x and h: 2Td + 4TKn bytes in a
2-byte type. `ratio` is a system's bytes over SonicMoE's.")]
pub struct MemoryArgs {
    /// T,d,n,E,K: tokens, model width, expert width, experts, experts per token
    #[arg(long)]
    shape: Shape,
    /// The storage type
    #[arg(long, default_value = "bf16")]
    dtype: DType,
    /// The activation; without a gate h is half as wide
    #[arg(long, default_value = "swiglu")]
    activation: Activation,
}

/// The text that the command prints.
pub fn memory(args: &MemoryArgs) -> String {
    let MemoryArgs { shape, dtype, activation } = *args;
    let layer = Layer::of(shape, activation, dtype.bytes());
    let ours = System::SonicMoe.kept(layer);
    let most = System::ALL.map(|system| system.kept(layer)).into_iter().max().unwrap_or(0);

    let mut text = format!("T,d,n,E,K = {shape}, {dtype}, {activation}\n\n");
    let mut table = Table::new([
        ("system", Align::Left),
        ("keeps", Align::Left),
        ("bytes", Align::Right),
        ("size", Align::Right),
        ("ratio", Align::Right),
        ("", Align::Left),
    ]);
    for system in System::ALL {
        let kept = system.kept(layer);
        let ratio = if ours == 0 { 1.0 } else { kept as f64 / ours as f64 };
        let bar = if most == 0 { 0 } else { (kept as f64 / most as f64 * 40.0).round() as usize };
        table.row([
            system.name().to_owned(),
            system.formula().to_owned(),
            kept.to_string(),
            size(kept),
            format!("{ratio:.2}"),
            "█".repeat(bar),
        ]);
    }
    text += &table.to_string();
    text += &format!(
        "\nSonicMoE's own tensors: x {}, h {}.\nPeak, weights apart: forward {} (x, h, a, y, o), backward {} \
         (x, h, dout, dh, a′, dx̃, dx).\n",
        size(layer.x),
        size(layer.h),
        size(layer.forward_peak()),
        size(layer.backward_peak()),
    );
    if dtype.bytes() != 2 || !activation.gated() {
        text += "The formulas are written for 2-byte elements and a gate; the bytes are this layer's.\n";
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_7b_layer_prints_its_bytes_and_every_system() {
        let shape = "24576,1536,256,128,8".parse().unwrap();
        let text = memory(&MemoryArgs { shape, dtype: DType::BF16, activation: Activation::SwiGlu });
        assert!(text.contains("264 MiB") && text.contains("x 72 MiB, h 192 MiB"), "{text}");
        assert!(System::ALL.iter().all(|system| text.contains(system.formula())), "{text}");
    }
}
