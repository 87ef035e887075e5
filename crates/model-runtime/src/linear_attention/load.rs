//! Loading a layer of linear attention, or one rank's heads of it.

use candle_core::{DType, Error, Result, Tensor};
use candle_nn::VarBuilder;
use moe_kernels::names::DeltaNames;
use moe_kernels::{QuantScheme, Unread, Weight};
use moe_layer::{BlockContext, load_packed};
use tracing::warn;

use super::LinearAttention;
use super::config::{LinearAttentionConfig, OUTPUT};
use crate::projection::Projection;

impl LinearAttention {
    /// Loads the part of a layer that is on this rank; `config` counts the heads of all ranks, and `vb` shows this
    /// rank's slices ([`LinearAttentionConfig::layout`]).
    ///
    /// # Errors
    /// Missing or wrongly shaped tensors; key heads that the geometry cannot cut; biases, which this layer does not
    /// have.
    pub fn load_part(
        config: &LinearAttentionConfig,
        names: &DeltaNames,
        vb: VarBuilder,
        context: &BlockContext,
    ) -> Result<Self> {
        let ranks = context.row_parallel(OUTPUT, config.heads.value_width())?;
        let all = config;
        let config = all.part(&context.geometry).map_err(Error::wrap)?;
        refuse_unread(names, &vb)?;
        let heads = config.heads;
        let channels = heads.channels();
        let width = heads.value_width();
        let input = Weight::new(input_rows(&config, names, &vb, context)?)?;
        let conv = vb.pp(names.conv).get((channels, 1, config.conv_width), "weight")?;
        let conv = conv.squeeze(1)?.to_dtype(DType::F32)?;
        let floats = vb.to_dtype(DType::F32);
        let stored_heads: Vec<_> =
            (0..heads.value_heads).map(|head| config.stored_value_head(head)).collect();
        let vector = |name: &str| in_order(floats.get(heads.value_heads, name)?, &stored_heads);
        let output = match all.reorders_values() {
            true => reordered_output(all, names, &vb, context)?,
            false => {
                let output = context.row_parallel_use(width);
                Projection::load([config.hidden_size, width], false, vb.pp(names.o), output, context)?
            }
        };
        Ok(Self {
            input: Projection { weight: input, bias: None }.packed(context.cpu_isa)?,
            output,
            conv: in_order(conv, &config.stored_rows([false; 2])[..channels])?.t()?.contiguous()?,
            a_log: vector(names.a_log)?,
            dt_bias: vector(names.dt_bias)?,
            norm: floats.pp(names.norm).get(heads.value_dim, "weight")?,
            config,
            ranks,
        })
    }
}

/// The rows of the input product, [P, H], in the order of [`DeltaHeads`](moe_kernels::DeltaHeads).
fn input_rows(
    config: &LinearAttentionConfig,
    names: &DeltaNames,
    vb: &VarBuilder,
    context: &BlockContext,
) -> Result<Tensor> {
    let heads = config.heads;
    let weight = |module: &str| format!("{module}.weight");
    let [qkvz, ba] = config.grouped_rows().map(|rows| rows * heads.key_heads);
    let grouped = [names.qkvz, names.ba].map(|module| vb.contains_tensor(&weight(module)));
    let first = match grouped[0] {
        true => vec![(names.qkvz, qkvz)],
        false => vec![(names.qkv, heads.channels()), (names.z, heads.value_width())],
    };
    let second = match grouped[1] {
        true => vec![(names.ba, ba)],
        false => vec![(names.b, heads.value_heads), (names.a, heads.value_heads)],
    };
    let parts = [first, second].concat();
    for (module, _) in &parts {
        let why = "the input product of linear attention is one matrix of several tensors";
        warn_if_quantised(vb, module, context, why)?;
    }
    let parts: Vec<_> = parts.into_iter().map(|(module, rows)| (weight(module), rows)).collect();
    in_order(load_packed(vb, &parts, &[config.hidden_size])?, &config.stored_rows(grouped))
}

/// Loads the output product of value heads that are stored in turns: this rank's columns, in the order in which heads
/// are computed.
fn reordered_output(
    all: &LinearAttentionConfig,
    names: &DeltaNames,
    vb: &VarBuilder,
    context: &BlockContext,
) -> Result<Projection> {
    let why = "the columns of the output product of linear attention change their order";
    warn_if_quantised(vb, names.o, context, why)?;
    let heads = all.heads;
    let stored = vb.pp(names.o).get((all.hidden_size, heads.value_width()), "weight")?;
    let (_, values) = all.cut(&context.geometry).map_err(Error::wrap)?;
    let columns = values.flat_map(|head| {
        let first = all.stored_value_head(head) * heads.value_dim;
        (first..first + heads.value_dim).map(|column| column as u32)
    });
    let columns = Tensor::new(columns.collect::<Vec<_>>(), stored.device())?;
    let weight = Weight::new(stored.index_select(&columns, 1)?)?;
    Projection { weight, bias: None }.packed(context.cpu_isa)
}

fn warn_if_quantised(vb: &VarBuilder, module: &str, context: &BlockContext, why: &str) -> Result<()> {
    let Some(source) = &context.quant else { return Ok(()) };
    let name = format!("{}.{module}", vb.prefix());
    if source.scheme(&name)? != QuantScheme::NONE {
        warn!("{name} is loaded as floats: {why}");
    }
    Ok(())
}

/// Returns the rows of `stored` in this order.
fn in_order(stored: Tensor, rows: &[usize]) -> Result<Tensor> {
    match rows.iter().enumerate().all(|(at, row)| at == *row) {
        true => Ok(stored),
        false => {
            let rows: Vec<u32> = rows.iter().map(|row| *row as u32).collect();
            stored.index_select(&Tensor::new(rows, stored.device())?, 0)
        }
    }
}

/// Fails if the checkpoint has tensors of a layer that change its results and that no layer here has.
fn refuse_unread(names: &DeltaNames, vb: &VarBuilder) -> Result<()> {
    let mut unread = Unread::under(vb);
    for module in
        [names.qkvz, names.ba, names.qkv, names.z, names.b, names.a, names.conv, names.o, names.norm]
    {
        unread.bias(&format!("{module}.bias"));
    }
    unread.refuse("linear attention", "its products, its convolution and its norm have no biases")
}
