//! A model of your own, served with continuous batching: eight requests of different lengths run side by side in one
//! paged KV cache, and each gets the tokens that it gets alone.
//!
//!     cargo run --release -p moe-examples --bin own_model
//!
//! The model is a decoder with grouped-query attention and a sparse MLP in every second layer. Its weights are
//! random; for a checkpoint in a folder give `Weights::Checkpoint(Checkpoint::open(folder)?)`, and
//! `session.tokenizer()` for text.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use candle_core::DType;
use candle_nn::VarBuilder;
use moe_engine::engine::{EngineConfig, Request};
use moe_engine::model_runtime::config::{RopeConfig, limits};
use moe_engine::model_runtime::{
    AttentionConfig, Config, ConfigError, DecoderConfig, DecoderModel, Geometry, GeometryError, LayerStates,
    MlaForm, MoeConfig, TensorLayout, TensorNames,
};
use moe_engine::{
    AttentionSpec, Families, LoadOptions, LoadedModel, ModelFamily, ModelSpec, Run, RunConfig, Weights,
};
use moe_layer::{MoePath, RouterConfig};

const CONFIG: &str = r#"{"model_type": "own", "hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 256}"#;

/// The row of the table by which a run finds the model of a config.
const OWN: ModelFamily = ModelFamily {
    model_type: "own",
    architecture: "OwnForCausalLM",
    example: "own/own-model",
    parse: |config| Ok(Box::new(Own(read(config)?))),
};

/// What a config says, as sizes of the decoder and its layers' attention.
fn read(config: &Config) -> Result<DecoderModel, ConfigError> {
    let hidden_size = config.size(&["hidden_size"], limits::WIDTH)?;
    let layers = config.size(&["num_hidden_layers"], limits::LAYERS)?;
    let router = RouterConfig { renormalize: true, ..RouterConfig::new(8, 2) };
    let attention = AttentionConfig::new(hidden_size, 4, 2, 16);
    let decoder = DecoderConfig {
        names: TensorNames::USUAL,
        vocab_size: config.size(&["vocab_size"], limits::VOCAB)?,
        hidden_size,
        intermediate_size: 2 * hidden_size,
        activation: config.activation()?,
        rms_norm_eps: 1e-6,
        zero_centred_norms: false,
        tie_word_embeddings: false,
        rope: vec![RopeConfig::from_config(config, 16, 1024)?; layers],
        moe: Some(MoeConfig::new(router, hidden_size)),
        is_sparse: (0..layers).map(|layer| layer % 2 == 1).collect(),
    };
    Ok(DecoderModel::alike(decoder, attention))
}

/// The model, before it is loaded.
struct Own(DecoderModel);

impl ModelSpec for Own {
    fn decoder(&self) -> &DecoderConfig {
        &self.0.decoder
    }

    fn attention(&self) -> AttentionSpec<'_> {
        AttentionSpec::Layers(&self.0.mixers)
    }

    fn layout(&self, geometry: &Geometry, has: &dyn Fn(&str) -> bool) -> Result<TensorLayout, GeometryError> {
        self.0.layout(geometry, has)
    }

    fn states(
        &self,
        geometry: &Geometry,
        _: Option<MlaForm>,
        dtype: DType,
    ) -> Result<LayerStates, GeometryError> {
        self.0.states(geometry, dtype)
    }

    fn load(&self, options: &LoadOptions, vb: VarBuilder) -> candle_core::Result<LoadedModel> {
        let options = options.decoder(MoePath::Fused);
        let (model, selection) = self.0.load(&options, vb)?;
        LoadedModel::new(Box::new(model), options.path, selection)
    }
}

/// Tokens that follow each of these prompts, by the number of the prompt.
fn generate(prompts: &[Vec<u32>]) -> Result<Vec<Vec<u32>>> {
    let run = Run::start(&RunConfig::default(), Families { table: &[OWN], only: None }, "own")?;
    let mut session = run.session(Weights::Random(Config::parse(CONFIG, "config.json")?))?;
    let mut engine = session.engine(None, &EngineConfig::for_device(&session.ex))?;
    let mut tokens = BTreeMap::new();
    for prompt in prompts {
        let request = Request { max_tokens: Some(8 + prompt.len()), ..Request::new(prompt.clone()) };
        tokens.insert(engine.add(request)?, Vec::new());
    }
    engine.run(|output| tokens.entry(output.request).or_default().extend(output.token_id))?;
    drop(engine);
    session.finish()?;
    Ok(tokens.into_values().collect())
}

fn main() -> Result<()> {
    let prompts: Vec<Vec<u32>> =
        (1..=8).map(|length| (0..length).map(|t| 7 * t + length).collect()).collect();
    let together = generate(&prompts)?;
    for (prompt, tokens) in prompts.iter().zip(&together) {
        println!("{prompt:?} -> {tokens:?}");
        ensure!(
            generate(std::slice::from_ref(prompt))? == [tokens.clone()],
            "{prompt:?}: other tokens alone"
        );
    }
    Ok(())
}
