//! What a decoder's checkpoint has, and what each rank holds of it: no element is missing, none is
//! read twice where ranks share.

use std::collections::{BTreeMap, HashMap};

use candle_core::{DType, Device, Result, Tensor};
use model_runtime::{
    AttentionConfig, AttentionNames, Config, DecoderConfig, DummyWeights, Geometry, MlpNames, MoeConfig,
    PackOrder, ParallelConfig, QkNorm, RankView, TensorLayout, TensorNames,
};
use moe_layer::RouterConfig;
use moe_quant::{Format, GgmlType, QuantConfig, QuantError};

use crate::message;

fn config(shared: usize) -> DecoderConfig {
    let json = Config::parse(r#"{"hidden_act": "silu"}"#, "config.json").unwrap();
    DecoderConfig {
        names: TensorNames { shared_experts: Some("shared_experts"), ..TensorNames::USUAL },
        vocab_size: 11,
        hidden_size: 6,
        intermediate_size: 12,
        activation: json.activation().unwrap(),
        rms_norm_eps: 1e-6,
        rope: vec![model_runtime::RopeConfig::from_config(&json, 4, 64).unwrap(); 2],
        moe: Some(MoeConfig {
            shared_intermediate_size: shared,
            ..MoeConfig::new(RouterConfig::new(5, 2), 8)
        }),
        is_sparse: vec![false, true],
        ..DecoderConfig::default()
    }
}

fn layout(
    config: &DecoderConfig,
    geometry: &Geometry,
    packed: bool,
) -> std::result::Result<TensorLayout, String> {
    let list =
        config.layout(geometry, &|name| packed && name.ends_with("gate_up_proj"), |_, prefix, list| {
            let output = list.geometry.row_shard("heads", 8)?.range;
            list.columns(format!("{prefix}.self_attn.o_proj.weight"), [6, 8], output);
            Ok(())
        });
    list.map_err(|e| e.to_string())
}

#[test]
fn shared_experts_are_counted_where_each_is_as_wide_as_a_routed_one() {
    let count = |width| config(width).moe.and_then(|moe| moe.shared_experts());
    assert_eq!([count(16), count(0), count(12)], [Some(2), Some(0), None]);
}

/// How many ranks hold each element of each stored tensor, for tensors that are cut.
fn holders(config: &DecoderConfig, parallel: ParallelConfig, packed: bool) -> BTreeMap<String, Vec<usize>> {
    let whole = layout(config, &Geometry::default(), packed).unwrap();
    assert!(whole.slices.is_empty(), "one rank holds all: {:?}", whole.slices);
    let shapes: BTreeMap<_, _> = whole.tensors.into_iter().map(|t| (t.name, t.shape)).collect();
    let mut held: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for rank in 0..parallel.world_size().unwrap() {
        let part = layout(config, &parallel.geometry(rank).unwrap(), packed).unwrap();
        let stored: BTreeMap<_, _> = part.tensors.into_iter().map(|t| (t.name, t.shape)).collect();
        assert_eq!(stored, shapes, "what a checkpoint has does not depend on ranks");
        for slice in part.slices {
            let shape = &shapes[&slice.stored];
            let counts = held.entry(slice.stored).or_insert_with(|| vec![0; shape.iter().product::<usize>()]);
            for (index, count) in counts.iter_mut().enumerate() {
                let mut rest = index;
                let inside = shape.iter().zip(&slice.ranges).rev().all(|(&dim, range)| {
                    let at = rest % dim;
                    rest /= dim;
                    range.contains(&at)
                });
                *count += usize::from(inside);
            }
        }
    }
    held
}

#[test]
fn each_element_is_held_once_by_the_ranks_that_share_a_tensor() {
    let ep = ParallelConfig { enable_expert_parallel: true, ..ParallelConfig::default() };
    for (parallel, packed, cut, times) in [
        // Embedding, projection, o_proj of two layers, three MLPs of a dense, shared and five experts.
        (ParallelConfig { tp: 2, ..ParallelConfig::default() }, false, 2 + 2 + 3 + 3 + 15, 1),
        (ParallelConfig { tp: 2, ..ParallelConfig::default() }, true, 2 + 2 + 3 + 3 + 2, 1),
        (ParallelConfig { tp: 2, ..ep }, true, 2 + 2 + 3 + 3 + 2, 1),
        (ParallelConfig { dp: 2, ..ep }, true, 2, 1),
        (ParallelConfig { dp: 7, ..ep }, true, 2, 1),
        // Whole experts under their own names need no slice.
        (ParallelConfig { dp: 2, ..ep }, false, 0, 1),
        (ParallelConfig { tp: 2, dp: 2, ..ParallelConfig::default() }, false, 2 + 2 + 3 + 3 + 15, 2),
    ] {
        let held = holders(&config(4), parallel, packed);
        assert_eq!(held.len(), cut, "{parallel:?} {packed}: {:?}", held.keys());
        for (name, counts) in held {
            assert!(counts.iter().all(|count| *count == times), "{name} {parallel:?}: {counts:?}");
        }
    }
}

/// `held` is what memory is counted by. The parts of all ranks together are the checkpoint, and a tensor that is not
/// cut is on every rank.
#[test]
fn ranks_hold_their_parts() {
    let ep = ParallelConfig { enable_expert_parallel: true, ..ParallelConfig::default() };
    for parallel in [
        ParallelConfig::default(),
        ParallelConfig { tp: 2, ..ParallelConfig::default() },
        ParallelConfig { tp: 2, ..ep },
        ParallelConfig { dp: 2, ..ep },
    ] {
        for packed in [false, true] {
            let ranks = parallel.world_size().unwrap();
            let lists: Vec<_> = (0..ranks)
                .map(|r| layout(&config(4), &parallel.geometry(r).unwrap(), packed).unwrap())
                .collect();
            let held = |of: &str| -> Vec<usize> {
                let list = |list: &TensorLayout| {
                    let held = list.held();
                    held.iter().filter(|held| held.stored.name.contains(of)).map(|held| held.elements).sum()
                };
                lists.iter().map(list).collect()
            };
            let experts = 5 * 3 * 8 * 6;
            assert_eq!(held(".experts.").iter().sum::<usize>(), experts, "{parallel:?} {packed}");
            assert!(
                ranks == 1 || held(".experts.").iter().all(|&part| part < experts),
                "{parallel:?} {packed}"
            );
            assert_eq!(held("input_layernorm"), vec![2 * 6; ranks]);
            let heads = 2 * 6 * 8;
            assert_eq!(held("o_proj"), vec![heads / parallel.tp; ranks]);
        }
    }
}

/// On a device every rank is shown its packs, [E_local, 2I, H] and [E_local, H, I], unless they are stored as such.
#[test]
fn packs_have_the_rows_of_all_local_experts() {
    let ep = ParallelConfig { enable_expert_parallel: true, ..ParallelConfig::default() };
    for (parallel, packed, experts, width) in [
        (ParallelConfig::default(), true, 0, 8),
        (ParallelConfig::default(), false, 5, 8),
        (ParallelConfig { tp: 2, ..ParallelConfig::default() }, false, 5, 4),
        (ParallelConfig { tp: 2, ..ParallelConfig::default() }, true, 5, 4),
        (ParallelConfig { dp: 2, ..ep }, false, 3, 8),
        (ParallelConfig { dp: 2, ..ep }, true, 3, 8),
    ] {
        let list = layout(&config(4), &parallel.geometry(0).unwrap(), packed).unwrap();
        let elements = |name: &str| {
            let parts =
                list.packs.iter().filter(|part| part.name == format!("model.layers.1.mlp.experts.{name}"));
            parts.map(|part| part.ranges.iter().map(|r| r.len()).product::<usize>()).sum::<usize>()
        };
        assert_eq!(
            (elements("w13"), elements("w2")),
            (experts * 2 * width * 6, experts * 6 * width),
            "{parallel:?}"
        );
        let slices = list.slices.len() + list.elsewhere.len();
        // Of stored packs each expert is shown, for maps that place it here.
        assert_eq!(list.elsewhere.len(), if packed && parallel.dp == 2 { 3 * (5 - experts) } else { 0 });
        assert_eq!(list.clone().slices_for(&Device::Cpu).len(), slices);
        assert_eq!(list.packs.len(), 3 * experts);
    }
}

/// Shared experts as wide as routed ones are also offered in packs after them, each cut like the others. If experts are
/// spread over ranks there are no such packs.
#[test]
fn packs_hold_shared_experts_behind_the_others() -> Result<()> {
    let config = config(16);
    let ep = ParallelConfig { enable_expert_parallel: true, dp: 2, ..ParallelConfig::default() };
    let list = layout(&config, &ep.geometry(0).unwrap(), false).unwrap();
    assert!(list.packs.iter().all(|part| !part.name.contains("with_shared")), "{:?}", list.packs);
    for (tp, packed) in [(1, false), (1, true), (2, false), (2, true)] {
        for rank in 0..tp {
            let geometry = ParallelConfig { tp, ..ParallelConfig::default() }.geometry(rank).unwrap();
            let list = layout(&config, &geometry, packed).unwrap();
            let weights = || DummyWeights::new(list.tensors.clone(), 3);
            let whole = weights().var_builder(DType::F32, &Device::Cpu);
            let shown = RankView::new(weights(), list.packs.clone()).var_builder(DType::F32, &Device::Cpu);
            let mlp = whole.pp("model.layers.1.mlp");
            let held = 8 / tp;
            let stored = |expert: usize, name: &str, dims: (usize, usize)| match (expert, packed) {
                (5.., _) => mlp
                    .pp("shared_experts")
                    .get(if dims.0 == 8 { (16, 6) } else { (6, 16) }, &format!("{name}.weight")),
                (_, false) => mlp.pp("experts").pp(expert).get(dims, &format!("{name}.weight")),
                (_, true) if name == "down_proj" => mlp.pp("experts").get((5, 6, 8), name)?.get(expert),
                (_, true) => {
                    let rows = mlp.pp("experts").get((5, 16, 6), "gate_up_proj")?.get(expert)?;
                    rows.narrow(0, if name == "gate_proj" { 0 } else { 8 }, 8)
                }
            };
            let part = |expert: usize, name: &str, dim: usize| {
                let first = expert.saturating_sub(5) * 8 + rank * held;
                let dims = if dim == 0 { (8, 6) } else { (6, 8) };
                stored(expert, name, dims)?.narrow(dim, first, held)?.contiguous()
            };
            let packs = shown.pp("model.layers.1.mlp.experts_with_shared_experts");
            let w13 = packs.get((7, 2 * held, 6), "w13")?;
            let w2 = packs.get((7, 6, held), "w2")?;
            for expert in 0..7 {
                let want = Tensor::cat(&[part(expert, "gate_proj", 0)?, part(expert, "up_proj", 0)?], 0)?;
                assert_eq!(
                    w13.get(expert)?.to_vec2::<f32>()?,
                    want.to_vec2::<f32>()?,
                    "{tp} {packed} {expert}"
                );
                let want = part(expert, "down_proj", 1)?;
                assert_eq!(
                    w2.get(expert)?.to_vec2::<f32>()?,
                    want.to_vec2::<f32>()?,
                    "{tp} {packed} {expert}"
                );
            }
            let plain = shown.pp("model.layers.1.mlp.experts").get((5, 2 * held, 6), "w13")?;
            assert_eq!(plain.to_vec3::<f32>()?, w13.narrow(0, 0, 5)?.to_vec3::<f32>()?);
        }
    }
    Ok(())
}

#[test]
fn what_cannot_be_cut_is_named() {
    let tp = |tp| ParallelConfig { tp, ..ParallelConfig::default() }.geometry(0).unwrap();
    let refused = |config: DecoderConfig, geometry| message(layout(&config, &geometry, false));
    let e = refused(config(2), tp(4));
    assert!(e.contains("the shared experts' intermediate size"), "{e}");
    let e = refused(DecoderConfig { intermediate_size: 6, ..config(4) }, tp(4));
    assert!(e.contains("intermediate_size"), "{e}");
    let mut narrow = config(4);
    narrow.moe.as_mut().unwrap().intermediate_size = 6;
    let e = refused(narrow, tp(4));
    assert!(e.contains("the experts' intermediate size") && e.contains("`enable_expert_parallel`"), "{e}");
}

#[test]
fn shared_experts_of_no_width_are_listed_where_a_checkpoint_has_them() {
    let usual = TensorNames::USUAL;
    let count = |names: &TensorNames, geometry: &Geometry, there: bool| {
        let has = |name: &str| there && name.contains("shared_experts");
        let config = DecoderConfig { names: *names, ..config(0) };
        let list = config.layout(geometry, &has, |_, _, _| Ok(())).unwrap();
        assert!(list.slices.iter().all(|slice| !slice.name.contains("shared")));
        list.tensors.iter().filter(|t| t.name.contains("shared_experts") && t.shape.contains(&0)).count()
    };
    assert_eq!(count(&config(0).names, &Geometry::default(), true), 3);
    assert_eq!(count(&config(0).names, &Geometry::default(), false), 0);
    assert_eq!(count(&usual, &Geometry::default(), true), 0);
}

#[test]
fn ranks_hold_their_heads_of_norms_over_all_heads() {
    let attention = AttentionConfig {
        num_heads: 8,
        num_kv_heads: 2,
        qk_norm: QkNorm::AllHeads,
        sinks: true,
        ..crate::tiny::attention_config(None)
    };
    let d = attention.head_dim;
    for (tp, kv_heads) in [(1, 2), (2, 1), (4, 1)] {
        for rank in 0..tp {
            let geometry = ParallelConfig { tp, ..ParallelConfig::default() }.geometry(rank).unwrap();
            let mut list = TensorLayout::new(&geometry);
            attention.layout(&AttentionNames::USUAL, "a", &mut list).unwrap();
            let held = |name: &str| {
                let held = list.held();
                held.iter().find(|held| held.stored.name == name).map(|held| held.elements)
            };
            assert_eq!(held("a.q_norm.weight"), Some(8 / tp * d));
            assert_eq!(held("a.sinks"), Some(8 / tp));
            assert_eq!(held("a.k_norm.weight"), Some(kv_heads * d));
            let part = attention.part(&geometry).unwrap();
            assert_eq!((part.num_heads, part.num_kv_heads), (8 / tp, kv_heads));
            let cached = part.kv_layout(DType::F32);
            assert_eq!((cached.num_kv_heads, cached.head_dim), (kv_heads, d));
        }
    }
}

/// On a GPU 128 columns of Q4_K share their floats, so ranks cut between such units. On a CPU they cut between groups
/// of 32 columns.
#[test]
fn parts_of_q4_k_on_a_gpu_have_whole_units() {
    let formats = HashMap::from([("a".to_string(), Format::Ggml(GgmlType::Q4K))]);
    let quantisation = QuantConfig::gguf(formats, Vec::new());
    for (ranks, is_read) in [(1, true), (2, true), (4, false), (3, true), (6, true), (8, false)] {
        let part = 768 / ranks;
        let mut list = TensorLayout::new(&Geometry::default());
        list.columns("a.weight", [256, 768], 0..part);
        list.check_quantised(&quantisation, false).unwrap();
        let checked = list.check_quantised(&quantisation, true);
        assert_eq!(checked.is_ok(), is_read, "{ranks}: {checked:?}");
        let named = |e: QuantError| e.to_string().contains("1, 2, 3, 6 work");
        assert!(checked.err().is_none_or(named), "{ranks}");
    }
}

#[test]
fn matrices_that_a_layer_loads_as_floats_need_no_kernel() {
    let formats = HashMap::from([("a".to_string(), Format::Ggml(GgmlType::Q6K))]);
    let quantisation = QuantConfig::gguf(formats, Vec::new());
    let mut list = TensorLayout::new(&Geometry::default());
    list.whole("a.weight", &[256, 256]);
    list.check_quantised(&quantisation, false).unwrap();
    let refused = list.check_quantised(&quantisation, true).unwrap_err().to_string();
    assert!(refused.contains("(`a`)"), "{refused}");
    list.floats.insert("a.weight".to_string());
    list.check_quantised(&quantisation, true).unwrap();
}

/// Packs that are stored by columns, in which gate and up take turns: single experts and this rank's packs are shown in
/// rows.
#[test]
fn packs_by_columns_are_shown_in_rows() -> Result<()> {
    let matrices = MlpNames { pack_order: PackOrder::Columns { in_turns: true }, ..MlpNames::USUAL };
    let moe = config(0).moe.map(|moe| MoeConfig { expert_bias: true, ..moe });
    let config = DecoderConfig { names: TensorNames { matrices, ..TensorNames::USUAL }, moe, ..config(0) };
    let has = |name: &str| ["gate_up_proj", "gate_up_proj_bias"].iter().any(|pack| name.ends_with(pack));
    for (tp, rank) in [(1, 0), (2, 0), (2, 1)] {
        let geometry = ParallelConfig { tp, ..ParallelConfig::default() }.geometry(rank).unwrap();
        let list = config.layout(&geometry, &has, |_, _, _| Ok(())).unwrap();
        let weights = || DummyWeights::new(list.tensors.clone(), 3);
        let experts = "model.layers.1.mlp.experts";
        let whole = weights().var_builder(DType::F32, &Device::Cpu).pp(experts);
        let slices = [list.slices.clone(), list.packs.clone()].concat();
        let shown = RankView::new(weights(), slices).var_builder(DType::F32, &Device::Cpu).pp(experts);
        let held = 8 / tp;
        let gate_up = whole.get((5, 6, 16), "gate_up_proj")?;
        let gate_up_bias = whole.get((5, 16), "gate_up_proj_bias")?;
        let down = whole.get((5, 8, 6), "down_proj")?;
        let w13 = shown.get((5, 2 * held, 6), "w13")?;
        let w13_bias = shown.get((5, 2 * held), "w13_bias")?;
        let w2 = shown.get((5, 6, held), "w2")?;
        for expert in 0..5 {
            for (turn, name) in ["gate_proj", "up_proj"].into_iter().enumerate() {
                let columns: Vec<u32> = (0..held).map(|i| (2 * (rank * held + i) + turn) as u32).collect();
                let columns = Tensor::new(columns, &Device::Cpu)?;
                let want = gate_up.get(expert)?.index_select(&columns, 1)?.t()?.to_vec2::<f32>()?;
                let single = shown.get((held, 6), &format!("{expert}.{name}.weight"))?;
                let packed = w13.get(expert)?.narrow(0, turn * held, held)?;
                assert_eq!(single.to_vec2::<f32>()?, want, "{name} of expert {expert}, rank {rank} of {tp}");
                assert_eq!(packed.to_vec2::<f32>()?, want);
                let want = gate_up_bias.get(expert)?.index_select(&columns, 0)?.to_vec1::<f32>()?;
                let single = shown.get(held, &format!("{expert}.{name}.bias"))?;
                let packed = w13_bias.get(expert)?.narrow(0, turn * held, held)?;
                assert_eq!(single.to_vec1::<f32>()?, want);
                assert_eq!(packed.to_vec1::<f32>()?, want);
            }
            let want = down.get(expert)?.narrow(0, rank * held, held)?.t()?.to_vec2::<f32>()?;
            let single = shown.get((6, held), &format!("{expert}.down_proj.weight"))?;
            assert_eq!(single.to_vec2::<f32>()?, want);
            assert_eq!(w2.get(expert)?.to_vec2::<f32>()?, want);
            let bias = whole.get((5, 6), "down_proj_bias")?.get(expert)?.to_vec1::<f32>()?;
            assert_eq!(shown.get(6, &format!("{expert}.down_proj.bias"))?.to_vec1::<f32>()?, bias);
        }
    }
    Ok(())
}
