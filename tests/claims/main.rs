//! Every claim of the project that needs no GPU, a module each.

mod agreement;
mod audit;
mod bounds;
mod command_line;
mod compared;
mod compile;
mod demonstrations;
mod dumper;
mod dumps;
mod exact;
mod generated;
mod gradients;
mod kept;
mod kernels;
mod laws;
mod museum;
mod planted;
mod replayed;
mod reports;
mod routing;
mod score;
mod swapped;
