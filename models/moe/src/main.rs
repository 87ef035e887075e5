//! `moe`: generate text with a checkpoint of any family.

use model_families::{ALL, EMBEDDED};
use moe_cli::Program;

#[global_allocator]
static ALLOCATOR: moe_cli::HugePages = moe_cli::HugePages;

fn main() -> std::process::ExitCode {
    moe_cli::main(&Program { families: ALL, embedded: Some(EMBEDDED) })
}
