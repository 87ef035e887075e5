//! `model-qwen3moe`: generate text with a Qwen3-MoE checkpoint.

#[global_allocator]
static ALLOCATOR: moe_engine::HugePages = moe_engine::HugePages;

fn main() -> std::process::ExitCode {
    moe_engine::main::<model_qwen3moe::Qwen3MoeFamily>()
}
