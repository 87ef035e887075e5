//! `model-qwen3moe`: generate text with a Qwen3-MoE checkpoint.

use model_families::{EMBEDDED, only, qwen3_moe};
use moe_cli::Program;

#[global_allocator]
static ALLOCATOR: moe_cli::HugePages = moe_cli::HugePages;

fn main() -> std::process::ExitCode {
    moe_cli::main(&Program { families: only(&qwen3_moe::FAMILY), embedded: Some(EMBEDDED) })
}
