//! Project tasks: `cargo xtask <task>`. There is one file per task. CI runs the same tasks.
#![forbid(unsafe_code)]

mod api;
mod dist;
mod eplb;
mod fixtures;
mod flags;
mod format_kernels;
mod kernels;
mod man;
mod modules;
mod names;
mod packaged;
mod parity;
mod plot;
mod quantize;
mod sanitizer;
mod standalone;
mod tidy;
mod toolkit;
mod trace;
mod wheel;
mod workspace;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Tasks of the moe workspace")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Check the rules of the workspace: dependency edges, module headers, file length, READMEs, links of pages,
    /// public items.
    Tidy,
    /// Write the public items of each library into its api.txt, or compare them (--check).
    Api(api::Args),
    /// Compare the models with Hugging Face transformers on recorded references.
    Parity(parity::Args),
    /// Recreate the reference fixtures with pinned transformers, in a virtual environment.
    Fixtures(fixtures::Args),
    /// Expert placement: bench, plan, replay and plot.
    #[command(subcommand)]
    Eplb(eplb::Command),
    /// Plot what runs have recorded.
    #[command(subcommand)]
    Plot(plot::Command),
    /// Run each library's README examples in a scratch project that has only that crate.
    Standalone(standalone::Args),
    /// Fetch a CUDA compiler and link libraries into target/toolkit where no CUDA is installed.
    Toolkit(toolkit::Args),
    /// Build the CUDA kernels and print registers, shared memory and spills of each.
    Kernels(kernels::Args),
    /// Format the CUDA sources with a pinned clang-format.
    FormatKernels(format_kernels::Args),
    /// Write the man pages of the programs into target/man.
    Man(man::Args),
    /// Make a quantised checkpoint from a float one.
    Quantize(quantize::Args),
    /// Write a checkpoint of random weights, plain or quantised.
    RandomCheckpoint(quantize::Args),
    /// Pack the CUDA binaries, GPU tests and fixtures into one archive for a GPU machine.
    Dist(dist::Args),
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().task {
        Task::Tidy => tidy::run(),
        Task::Api(args) => api::run(&args),
        Task::Eplb(command) => eplb::run(&command),
        Task::Plot(command) => plot::run(&command),
        Task::Parity(args) => parity::run(&args),
        Task::Fixtures(args) => fixtures::run(&args),
        Task::Standalone(args) => standalone::run(&args),
        Task::Toolkit(args) => toolkit::run(&args),
        Task::Kernels(args) => kernels::run(&args),
        Task::FormatKernels(args) => format_kernels::run(&args),
        Task::Man(args) => man::run(&args),
        Task::Quantize(args) => quantize::run("quantize", &args),
        Task::RandomCheckpoint(args) => quantize::run("random-checkpoint", &args),
        Task::Dist(args) => dist::run(&args),
    }
}
