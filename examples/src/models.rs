//! The changed models, as the build script made them, and Qwen3-MoE with the block of candle-transformers that has f32
//! on a GPU, too. They find in this crate what they take from candle-transformers.

pub use candle_transformers::models::with_tracing;

pub mod deepseek2 {
    include!(concat!(env!("OUT_DIR"), "/deepseek2.rs"));
}

pub mod mixtral {
    include!(concat!(env!("OUT_DIR"), "/mixtral.rs"));
}

pub mod qwen3 {
    include!(concat!(env!("OUT_DIR"), "/qwen3.rs"));
}

pub mod qwen3_moe_unfused {
    include!(concat!(env!("OUT_DIR"), "/qwen3_moe_unfused.rs"));
}

pub mod qwen3_moe {
    include!(concat!(env!("OUT_DIR"), "/qwen3_moe.rs"));
}
