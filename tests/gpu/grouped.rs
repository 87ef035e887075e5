//! Groups of experts in the router's launch: the choices of the CPU, where many keys are equal.

use candle_core::{DType, Tensor};
use moe_kernels::half::bf16;
use moe_kernels::{Buffer, Exec, LaunchLog, StepContext};
use moe_router::{GateInput, RouteOutput, Router, RouterConfig, RouterParams, Scoring, Selection};

use crate::common::*;

/// Logits and biases such that keys, and sums of two keys, are either equal or further apart than scores are rounded.
const LOGITS: [f32; 6] = [-2.0, -0.75, 0.25, 0.5, 1.5, 3.0];
const BIASES: [f32; 4] = [0.0, 0.125, 1.0, -0.375];

/// Rows whose columns are the logits, and the gate that makes them so.
struct Case {
    config: RouterConfig,
    bias: Vec<f32>,
    rows: Buffer,
    gate: Buffer,
}

impl Case {
    fn new(rng: &mut Rng, config: &RouterConfig, tokens: usize) -> Self {
        let experts = config.num_experts;
        let hidden = experts.next_multiple_of(64);
        // The bias is the same for all experts of a group. With a bias for each expert, sums of different keys would
        // differ only by their rounding.
        let Selection::Grouped { num_expert_group: groups, .. } = config.selection else {
            panic!("{config:?}")
        };
        let of_group: Vec<f32> = (0..groups).map(|_| BIASES[rng.below(BIASES.len())]).collect();
        let bias = (0..experts).map(|e| of_group[e * groups / experts]).collect();
        let mut rows = vec![bf16::ZERO; tokens * hidden];
        for (t, row) in rows.chunks_mut(hidden).enumerate() {
            // In every fourth row all experts have equal logits, so all groups are equal, apart from their biases.
            let choices = if t % 4 == 3 { 1 } else { LOGITS.len() };
            row[..experts].fill_with(|| bf16::from_f32(LOGITS[rng.below(choices)]));
        }
        let mut gate = vec![bf16::ZERO; experts * hidden];
        (0..experts).for_each(|e| gate[e * hidden + e] = bf16::ONE);
        Self {
            config: config.clone(),
            bias,
            rows: Buffer::from_vec(rows, &[tokens, hidden]).unwrap(),
            gate: Buffer::from_vec(gate, &[experts, hidden]).unwrap(),
        }
    }

    /// Ids and weights, and the launches that a device needs.
    fn run(&self, ex: Exec) -> (Vec<u32>, Vec<f32>, Vec<String>) {
        let log = LaunchLog::default();
        let mut p = Place::new(ex.with_launch_log(Some(log.clone())));
        let mut params = RouterParams::default();
        if self.config.correction_bias {
            params.correction_bias = Some(Tensor::new(&self.bias[..], p.ex.device()).unwrap());
        }
        let router = Router::new(self.config.clone(), params).unwrap();
        let dims = [self.rows.dims()[0], self.config.top_k];
        let rows = p.put(&self.rows);
        let gate = p.put(&self.gate);
        let mut ids = p.out(DType::U32, &dims);
        let mut weights = p.out(DType::F32, &dims);
        let out = RouteOutput {
            topk_ids: ids.view_mut(),
            topk_weights: weights.view_mut(),
            zero_expert_weights: None,
        };
        let input = GateInput::new(rows.view(), gate.view(), 0);
        router.gate_and_route_into(&input, None, out, &mut StepContext::default(), &mut p.ex).unwrap();
        let launched = log.take().into_iter().map(|one| one.kernel).collect();
        (values::<u32>(&ids.host(&p)), weights.floats(&p), launched)
    }
}

/// DeepSeek-V2's rule and DeepSeek-V3's, and the latter with other scores.
fn rules(experts: usize, top_k: usize, selection: &Selection) -> [RouterConfig; 3] {
    let base = RouterConfig { selection: selection.clone(), ..RouterConfig::new(experts, top_k) };
    let biased = |scoring| RouterConfig {
        scoring,
        correction_bias: true,
        renormalize: true,
        routed_scaling_factor: 2.5,
        ..base.clone()
    };
    [
        RouterConfig { routed_scaling_factor: 16.0, ..base.clone() },
        biased(Scoring::Sigmoid),
        biased(Scoring::SqrtSoftplus),
    ]
}

#[test]
fn groups_are_kept_as_on_the_cpu() {
    let mut rng = Rng::new();
    // The columns are E, K, groups, kept groups. The last case keeps all of its groups, so groups make no difference.
    let sizes = [
        (8, 2, 4, 2),
        (64, 6, 8, 3),
        (96, 4, 3, 1),
        (160, 6, 8, 3),
        (256, 8, 8, 4),
        (384, 8, 12, 5),
        (1024, 32, 32, 8),
        (64, 6, 1, 1),
    ];
    for (experts, top_k, num_expert_group, topk_group) in small(sizes, 400, |size| size.0) {
        let selection = Selection::Grouped { num_expert_group, topk_group };
        for config in rules(experts, top_k, &selection) {
            for tokens in [0, 1, 5, 37, 600] {
                let case = Case::new(&mut rng, &config, tokens);
                let (ids, weights, _) = case.run(Exec::cpu());
                let (got, got_weights, launched) = case.run(cuda());
                let what = format!("{tokens} tokens, {config:?}");
                if tokens > 0 {
                    assert_eq!(launched, ["gate_route"], "{what}");
                }
                assert_eq!(got, ids, "{what}");
                for (got, want) in got_weights.iter().zip(&weights) {
                    assert!((got - want).abs() <= 2e-5 * want.abs(), "{what}: {got}, expected {want}");
                }
            }
        }
    }
}

#[test]
fn more_groups_than_a_warp_has_lanes_take_a_launch_of_their_own() {
    let mut rng = Rng::new();
    let selection = Selection::Grouped { num_expert_group: 33, topk_group: 5 };
    for config in rules(66, 4, &selection) {
        let case = Case::new(&mut rng, &config, 9);
        let (ids, ..) = case.run(Exec::cpu());
        let (got, _, launched) = case.run(cuda());
        assert_eq!(got, ids, "{config:?}");
        assert!(!launched.iter().any(|name| name == "gate_route"), "{launched:?}");
    }
}
