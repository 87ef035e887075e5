//! `model-qwen3moe`: generate text with a Qwen3-MoE checkpoint.

fn main() -> std::process::ExitCode {
    moe_engine::main::<model_qwen3moe::Qwen3MoeFamily>()
}
