//! Decoders whose layers differ: in heads, window, rotary embedding and what they cache.

use candle_core::{DType, Device, Result, Tensor, bail};
use candle_nn::VarBuilder;
use model_runtime::config::{Config, RopeConfig};
use model_runtime::{
    Attention, AttentionConfig, BlockContext, CausalLm, Decoder, DecoderConfig, DecoderModel, DecoderOptions,
    DummyWeights, Exec, Geometry, KvCache, LayerCache, LayerState, LogitsRows, Mixer, MixerConfig, MixerIo,
    Observed, Observer, QkNorm, RmsNorm, Rope, RopeRows, RotatedPairs, SequenceStep, Step, StepContext,
    StepViews, TensorNames, View, host_logits, run_step,
};
use moe_kernels::copy_rows_into;
use moe_kernels::plan::{Fusion, Machine, Stage};
use moe_layer::{GatedMlp, MoePath, PlanStep};

const HIDDEN: usize = 24;
const INTERMEDIATE: usize = 20;
const VOCAB: usize = 33;
const BLOCK: usize = 4;

fn attention(heads: [usize; 3], sliding_window: Option<usize>) -> AttentionConfig {
    let [num_heads, num_kv_heads, head_dim] = heads;
    AttentionConfig {
        hidden_size: HIDDEN,
        num_heads,
        num_kv_heads,
        head_dim,
        rotary_dim: if head_dim == 12 { 8 } else { head_dim },
        rotated_pairs: RotatedPairs::Halves,
        qkv_bias: false,
        o_bias: false,
        qk_norm: QkNorm::None,
        rms_norm_eps: 1e-6,
        sliding_window,
        softmax_scale: None,
        sinks: false,
        output_gate: false,
        zero_centred_norms: false,
    }
}

fn rope(text: &str, head_dim: usize) -> RopeConfig {
    RopeConfig::partial_from_config(&Config::parse(text, "config.json").unwrap(), head_dim, 64, 1.0).unwrap()
}

/// Three layers, of which the first and the last have the same rotary embedding.
fn model() -> DecoderModel {
    let layers = [([4, 2, 8], None), ([2, 1, 12], Some(3)), ([6, 6, 8], Some(5))];
    let json = Config::parse(r#"{"hidden_act": "silu"}"#, "config.json").unwrap();
    let near = rope(r#"{"rope_theta": 100.0}"#, 8);
    let far = rope(
        r#"{"rope_theta": 5e4, "partial_rotary_factor": 0.67, "rope_scaling": {"type": "linear", "factor": 2.0}}"#,
        12,
    );
    let decoder = DecoderConfig {
        vocab_size: VOCAB,
        hidden_size: HIDDEN,
        intermediate_size: INTERMEDIATE,
        activation: json.activation().unwrap(),
        rms_norm_eps: 1e-6,
        rope: vec![near.clone(), far, near],
        is_sparse: vec![false; 3],
        ..DecoderConfig::default()
    };
    let mixer = |(heads, window)| MixerConfig::Attention(attention(heads, window));
    DecoderModel { decoder, mixers: layers.map(mixer).into() }
}

fn weights(model: &DecoderModel) -> VarBuilder<'static> {
    let list = model.layout(&Geometry::default(), &|_| false).unwrap();
    DummyWeights::new(list.tensors, 3).var_builder(DType::F32, &Device::Cpu)
}

/// The hidden states of each layer.
#[derive(Default)]
struct Seen(Vec<Vec<f32>>);

impl Observer for Seen {
    fn observe(&mut self, what: Observed, data: View) -> Result<()> {
        if let Observed::HiddenStates(_) = what {
            self.0.push(data.cpu::<f32>()?.to_vec());
        }
        Ok(())
    }
}

fn step(ids: &[u32], start: usize) -> Step {
    let end = start + ids.len();
    let blocks: Vec<u32> = (0..end.div_ceil(BLOCK) as u32).map(|block| 7 - block).collect();
    let sequence = SequenceStep {
        token_ids: ids,
        start,
        prompt_len: end,
        blocks: &blocks,
        logits: LogitsRows::All,
        scored: &[],
    };
    Step::new([sequence], BLOCK).unwrap()
}

#[test]
fn each_layer_has_its_own_cache() -> Result<()> {
    let model = model();
    let states = model.states(&Geometry::default(), DType::F32).unwrap();
    let decoder = load(&model, weights(&model))?;
    assert_eq!(decoder.info().states, states);
    assert_eq!(states.bytes_per_token()?, 4 * 2 * (2 * 8 + 12 + 6 * 8));
    let mut kv = KvCache::new(&states, 3, BLOCK)?;
    assert_eq!(kv.layer_mut(1)?.paged()?.k().dims(), [3, 1, BLOCK, 12]);
    assert_eq!(kv.layer_mut(2)?.paged()?.v().dims(), [3, 6, BLOCK, 8]);
    Ok(())
}

fn load(model: &DecoderModel, vb: VarBuilder) -> Result<impl CausalLm> {
    let context = BlockContext::default();
    let options =
        DecoderOptions { path: MoePath::Fused, backend: None, context: &context, expert_offload: None };
    Ok(model.load(&options, vb)?.0)
}

/// A mixer that gives its rows back.
struct Same(LayerState);

impl Mixer for Same {
    fn state(&self) -> LayerState {
        self.0
    }

    fn stages(&self, _: Fusion, _: &PlanStep, _: &Machine) -> Vec<Stage> {
        vec![Stage::new(&["rows"], "copy_rows")]
    }

    fn forward_into(
        &self,
        io: MixerIo,
        _: &StepViews,
        _: &RopeRows,
        _: &mut LayerCache,
        ex: &mut Exec,
    ) -> Result<()> {
        match io {
            MixerIo::Store { x, out } => copy_rows_into(x.floats("a mock")?, out, ex),
            io => bail!("expected rows without anything around them, got {:?}", io.fusion()),
        }
    }
}

/// The residual stream after each layer, from the layers one by one; the mixer of layer `same` gives its rows back.
fn by_hand(model: &DecoderModel, vb: &VarBuilder, ids: &[u32], same: Option<usize>) -> Result<Vec<Vec<f32>>> {
    let table = vb.get((VOCAB, HIDDEN), "model.embed_tokens.weight")?;
    let mut hidden = table.index_select(&Tensor::new(ids, &Device::Cpu)?, 0)?;
    let mut seen = vec![hidden.flatten_all()?.to_vec1()?];
    let step = step(ids, 0);
    for (index, config) in model.attention_layers().enumerate() {
        let vb = vb.pp("model.layers").pp(index);
        let mut kv = KvCache::new(&config.kv_layout(DType::F32).layers(1), 8, BLOCK)?;
        let rope = Rope::new(model.decoder.rope[index].clone());
        let attention =
            Attention::load(config.clone(), TensorNames::USUAL.grouped_query, vb.pp("self_attn"))?;
        let x = RmsNorm::load(HIDDEN, 1e-6, vb.pp("input_layernorm"))?.forward(&hidden)?;
        let mixed = match same == Some(index) {
            true => x,
            false => attention.forward(&x, &step.views()?, &rope, kv.layer_mut(0)?)?,
        };
        hidden = (&hidden + mixed)?;
        let x = RmsNorm::load(HIDDEN, 1e-6, vb.pp("post_attention_layernorm"))?.forward(&hidden)?;
        let mlp = GatedMlp::load(HIDDEN, INTERMEDIATE, model.decoder.activation, vb.pp("mlp"))?;
        hidden = (&hidden + mlp.forward(&x)?)?;
        seen.push(hidden.flatten_all()?.to_vec1()?);
    }
    let normed = RmsNorm::load(HIDDEN, 1e-6, vb.pp("model.norm"))?.forward(&hidden)?;
    seen[3] = normed.flatten_all()?.to_vec1()?;
    Ok(seen)
}

fn expect_close(seen: &Seen, want: &[Vec<f32>]) {
    assert_eq!(seen.0.len(), want.len());
    for (layer, (got, want)) in seen.0.iter().zip(want).enumerate() {
        let error = got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
        assert!(got.len() == want.len() && error < 1e-5, "after layer {layer}: {error}");
    }
}

#[test]
fn mixers_of_two_kinds_share_a_decoder() -> Result<()> {
    let model = model();
    let vb = weights(&model);
    let context = BlockContext::default();
    let options =
        DecoderOptions { path: MoePath::Fused, backend: None, context: &context, expert_offload: None };
    let (decoder, _) = Decoder::load(&model.decoder, &options, vb.clone(), |layer, vb| {
        let config = model.attention(layer).unwrap();
        Ok(match layer {
            1 => Box::new(Same(LayerState::Paged(config.kv_layout(DType::F32)))),
            _ => {
                let vb = vb.pp(TensorNames::USUAL.attention);
                Box::new(Attention::load(config.clone(), TensorNames::USUAL.grouped_query, vb)?)
            }
        })
    })?;
    let ids: Vec<u32> = (0..9).map(|i| i * 5 % VOCAB as u32).collect();
    let mut kv = KvCache::new(&decoder.info().states, 8, BLOCK)?;
    let mut seen = Seen::default();
    let context = &mut StepContext::default();
    run_step(&decoder, &step(&ids, 0), &mut kv, Some(&mut seen), context, &mut Exec::cpu())?;
    expect_close(&seen, &by_hand(&model, &vb, &ids, Some(1))?);
    let plans = decoder.plan(&PlanStep::prompts(9), &Machine::default());
    let kernels = |layer: usize| plans[layer].attention.iter().map(|stage| stage.kernel.as_str());
    assert!(kernels(1).eq(["copy_rows"]) && kernels(0).count() > 2, "{plans:?}");
    Ok(())
}

#[test]
fn a_decoder_computes_what_its_layers_do() -> Result<()> {
    let model = model();
    let vb = weights(&model);
    let decoder = load(&model, vb.clone())?;
    let ids: Vec<u32> = (0..17).map(|i| i * 7 % VOCAB as u32).collect();
    let mut kv = KvCache::new(&decoder.info().states, 8, BLOCK)?;
    let mut ex = Exec::cpu();
    let mut seen = Seen::default();
    let whole =
        run_step(&decoder, &step(&ids, 0), &mut kv, Some(&mut seen), &mut StepContext::default(), &mut ex)?;
    let whole = host_logits(&decoder, &whole, &ex)?.view().cpu::<f32>()?.to_vec();
    expect_close(&seen, &by_hand(&model, &vb, &ids, None)?);
    // One token after the other gives the same bits.
    let mut kv = KvCache::new(&decoder.info().states, 8, BLOCK)?;
    for (at, id) in ids.iter().enumerate() {
        let mut context = StepContext::default();
        let logits = run_step(&decoder, &step(&[*id], at), &mut kv, None, &mut context, &mut ex)?;
        assert_eq!(host_logits(&decoder, &logits, &ex)?.view().cpu::<f32>()?, &whole[at * VOCAB..][..VOCAB]);
    }
    Ok(())
}

#[test]
fn settings_that_do_not_fit_the_layers_are_refused() {
    let refused = |model: DecoderModel| {
        let vb = VarBuilder::zeros(DType::F32, &Device::Cpu);
        load(&model, vb).err().unwrap().to_string()
    };
    let mut few = model();
    few.mixers.pop();
    let e = refused(few);
    assert!(e.contains("expected a mixer for each of 3 layers, got 2"), "{e}");
    let mut other = model();
    other.decoder.rope.swap(0, 1);
    let e = refused(other);
    assert!(e.contains("rotary embedding of layer 0") && e.contains("[8, 8], got [8, 12]"), "{e}");
    let mut few = model();
    few.decoder.rope.pop();
    let e = refused(few);
    assert!(e.contains("rotary embedding: expected settings for each of 3 layers, got 2"), "{e}");
}
