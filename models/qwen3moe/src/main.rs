//! `model-qwen3moe`: generate text with a Qwen3-MoE checkpoint.

#[global_allocator]
static ALLOCATOR: moe_cli::HugePages = moe_cli::HugePages;

fn main() -> std::process::ExitCode {
    moe_cli::main::<model_families::qwen3_moe::Qwen3MoeFamily>()
}
