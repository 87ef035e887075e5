//! `model-deepseekv2-legacy`: generate text with a DeepSeek-V2 or V2-Lite checkpoint.

use model_families::{deepseek_v2, only};
use moe_cli::Program;

#[global_allocator]
static ALLOCATOR: moe_cli::HugePages = moe_cli::HugePages;

fn main() -> std::process::ExitCode {
    moe_cli::main(&Program { families: only(&deepseek_v2::FAMILY), embedded: None })
}
