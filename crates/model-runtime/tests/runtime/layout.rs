//! What a decoder's checkpoint has, and what each rank holds of it: no element is missing, none is
//! read twice where ranks share.

use std::collections::BTreeMap;

use model_runtime::{Config, DecoderConfig, DecoderNames, Geometry, MoeConfig, ParallelConfig, TensorLayout};
use moe_layer::RouterConfig;

use crate::message;

fn config(shared: usize) -> DecoderConfig {
    let json = Config::parse(r#"{"hidden_act": "silu"}"#, "config.json").unwrap();
    DecoderConfig {
        vocab_size: 11,
        hidden_size: 6,
        intermediate_size: 12,
        activation: json.activation().unwrap(),
        rms_norm_eps: 1e-6,
        tie_word_embeddings: false,
        rope: model_runtime::RopeConfig::from_config(&json, 4, 64).unwrap(),
        moe: Some(MoeConfig {
            router: RouterConfig::new(5, 2),
            intermediate_size: 8,
            shared_intermediate_size: shared,
        }),
        is_sparse: vec![false, true],
    }
}

fn layout(config: &DecoderConfig, geometry: &Geometry, packed: bool) -> Result<TensorLayout, String> {
    let names = DecoderNames { shared_experts: Some("shared_experts"), ..DecoderNames::default() };
    let list =
        config.layout(&names, geometry, &|name| packed && name.ends_with("gate_up_proj"), |prefix, list| {
            let output = list.geometry.row_shard("heads", 8)?.range;
            list.columns(format!("{prefix}.o_proj.weight"), [6, 8], output);
            Ok(())
        });
    list.map_err(|e| e.to_string())
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
        let slices = list.slices.len();
        assert_eq!(list.clone().slices_for(&candle_core::Device::Cpu).len(), slices);
        assert_eq!(list.packs.len(), 3 * experts);
    }
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
    assert!(e.contains("the experts' intermediate size") && e.contains("--enable-expert-parallel"), "{e}");
}

#[test]
fn shared_experts_of_no_width_are_listed_where_a_checkpoint_has_them() {
    let names = DecoderNames { shared_experts: Some("shared_experts"), ..DecoderNames::default() };
    let count = |names: &DecoderNames, geometry: &Geometry, there: bool| {
        let has = |name: &str| there && name.contains("shared_experts");
        let list = config(0).layout(names, geometry, &has, |_, _| Ok(())).unwrap();
        assert!(list.slices.iter().all(|slice| !slice.name.contains("shared")));
        list.tensors.iter().filter(|t| t.name.contains("shared_experts") && t.shape.contains(&0)).count()
    };
    assert_eq!(count(&names, &Geometry::default(), true), 3);
    assert_eq!(count(&names, &Geometry::default(), false), 0);
    assert_eq!(count(&DecoderNames::default(), &Geometry::default(), true), 0);
}
