//! Expert layers with biases and the clamped activation of gpt-oss, by each kernel that the plan can choose.

use moe_kernels::plan::ExpertsForm;
use moe_kernels::{Activation, QuantGroup, QuantScheme};

use crate::common::*;
use crate::fused::{Case, check, work};
use crate::packs::Packs;
use crate::quant::matrices::{fp8, int, q4k};

/// The activation of gpt-oss.
const OAI: Activation = Activation::SwiGluOai { alpha: 1.702, limit: 7.0 };

/// Biases of gate and up, and of down, and the activation. Sums are beyond the limits of many values.
const EPILOGUES: [([bool; 2], Activation); 5] = [
    ([true, true], OAI),
    ([true, false], OAI),
    ([false, true], Activation::SwiGluOai { alpha: 0.8, limit: 1.5 }),
    ([true, true], Activation::SwiGlu),
    ([false, false], OAI),
];

/// Sizes like in gpt-oss, whose H and I of 2,880 are odd multiples of 64.
#[test]
fn experts_with_biases_are_those_of_their_definition() {
    use ExpertsForm::{OneLaunch, Stream, Tensor, Wide};
    let mut rng = Rng::new();
    let cases: [(bool, Case); 22] = [
        (false, (OneLaunch, [8, 2, 64, 64], 1)),
        (false, (OneLaunch, [5, 3, 2880, 2880], 1)),
        (false, (OneLaunch, [5, 3, 2880, 2880], 2)),
        (false, (OneLaunch, [7, 4, 2880, 2880], 4)),
        (false, (OneLaunch, [60, 6, 1024, 448], 4)),
        (false, (OneLaunch, [5, 1, 576, 1344], 3)),
        (false, (Stream, [8, 2, 64, 64], 7)),
        (false, (Stream, [5, 3, 2880, 2880], 5)),
        (false, (Stream, [16, 4, 320, 192], 6)),
        // This has more experts than the tables of the other kernels can hold.
        (false, (Stream, [2100, 4, 64, 64], 200)),
        (false, (Tensor, [8, 2, 64, 64], 40)),
        (false, (Tensor, [16, 4, 320, 192], 17)),
        (false, (Tensor, [5, 3, 2880, 2880], 8)),
        (false, (Tensor, [5, 3, 2880, 2880], 40)),
        (true, (Tensor, [60, 6, 1024, 448], 40)),
        (true, (Tensor, [5, 1, 576, 1344], 3)),
        (true, (Tensor, [3, 1, 192, 320], 400)),
        (false, (Wide, [8, 2, 64, 64], 300)),
        (false, (Wide, [16, 4, 320, 192], 330)),
        (false, (Wide, [5, 3, 2880, 2880], 60)),
        (false, (Wide, [5, 3, 2880, 2880], 130)),
        (false, (Wide, [5, 1, 576, 1344], 700)),
    ];
    for (at, (invariant, case)) in small(cases, 3 << 20, |(_, case)| work(case)).into_iter().enumerate() {
        let [experts, _, hidden, inter] = case.1;
        let each = if hidden < 1024 { EPILOGUES.len() } else { 1 };
        for (biased, activation) in EPILOGUES.into_iter().cycle().skip(at).take(each) {
            let packs = Packs::new(&mut rng, experts, [hidden, inter], None);
            let packs = packs.with_epilogue(&mut rng, biased, activation);
            check(&mut rng, case, &packs, &cuda().with_batch_invariant(invariant));
        }
    }
}

/// Quantised experts, by their kernels of a whole layer, for digits, for few rows, for tiles and for prompts.
#[test]
fn quantised_experts_with_biases_are_those_of_their_definition() {
    use ExpertsForm::{OneLaunch, Stream, Tensor, Wide};
    let mut rng = Rng::new();
    let forms: [(bool, ExpertsForm, usize, usize); 9] = [
        (false, OneLaunch, 3, 1),
        (false, OneLaunch, 3, 2),
        (false, OneLaunch, 3, 4),
        (false, Stream, 9, 4),
        (false, Tensor, 3, 6),
        (false, Tensor, 3, 20),
        (false, Tensor, 3, 70),
        (true, Tensor, 3, 40),
        (false, Wide, 3, 300),
    ];
    let schemes: [QuantScheme; 6] = [
        int(4, 128, false, false),
        int(4, 32, true, false),
        int(8, 64, true, false),
        fp8(QuantGroup::Block { n: 128, k: 128 }),
        QuantScheme::fp4(QuantGroup::Size(32)),
        q4k(),
    ];
    for (at, [hidden, inter]) in
        small([[128, 128], [384, 256], [1024, 384]], 128, |size| size[0]).into_iter().enumerate()
    {
        for (scheme, (biased, activation)) in schemes.into_iter().zip(EPILOGUES.into_iter().cycle().skip(at))
        {
            let packs = Packs::new(&mut rng, 12, [hidden, inter], Some(scheme));
            let packs = packs.with_epilogue(&mut rng, biased, activation);
            for (invariant, form, top_k, tokens) in small(forms, 9, |form| form.3) {
                let case = (form, [12, top_k, hidden, inter], tokens);
                check(&mut rng, case, &packs, &cuda().with_batch_invariant(invariant));
            }
        }
    }
    // The widths of gpt-oss, which end in half of a step of 128 columns.
    for scheme in [QuantScheme::fp4(QuantGroup::Size(32)), int(4, 32, true, false), fp8(QuantGroup::Channel)]
    {
        let (biased, activation) = EPILOGUES[0];
        let packs = Packs::new(&mut rng, 5, [2880, 2880], Some(scheme));
        let packs = packs.with_epilogue(&mut rng, biased, activation);
        let forms = [(OneLaunch, 1), (OneLaunch, 3), (Tensor, 8), (Tensor, 60), (Wide, 130)];
        for (form, tokens) in small(forms, 0, |_| 1) {
            check(&mut rng, (form, [5, 3, 2880, 2880], tokens), &packs, &cuda());
        }
    }
}
