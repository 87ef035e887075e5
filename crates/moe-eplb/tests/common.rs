//! Inputs that the property tests share.

use moe_eplb::{Loads, Topology};
use proptest::prelude::*;

/// A shape that every policy accepts, with loads of one to `steps` episodes and `layers` layers.
pub fn case(max_layers: usize, max_steps: usize) -> impl Strategy<Value = (Topology, Loads)> {
    (1usize..=8, 1usize..=5, 1usize..=max_layers, 1usize..=max_steps)
        .prop_flat_map(|(devices, k, layers, steps)| (Just((devices, k, layers, steps)), k..=devices * k))
        .prop_flat_map(|((devices, k, layers, steps), experts)| {
            let load =
                prop_oneof![1 => Just(0.0), 4 => 0.0..100.0f64, 2 => (0.0..12.0f64).prop_map(f64::exp2)];
            (
                Just((devices, k, layers, steps, experts)),
                prop::collection::vec(load, steps * layers * experts),
            )
        })
        .prop_map(|((devices, k, layers, steps, experts), values)| {
            let topology = Topology::new(experts, devices * k, devices).unwrap();
            (topology, Loads::episodes(steps, layers, experts, &values).unwrap())
        })
}
