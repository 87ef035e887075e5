//! Ranks and chunks on the command line, on both expert paths and in both forms of attention.
#![allow(clippy::unwrap_used)] // helpers of tests are not tests in clippy's eyes

#[path = "../../../tests/cli/program.rs"]
mod program;
#[path = "../../../tests/cli/ranks.rs"]
mod ranks;

use program::{Program, fixture};

fn with(flags: &[&str], check: impl Fn(&Program)) {
    let model = fixture("deepseek-text");
    let flags = [&["--model", model.to_str().unwrap()], flags].concat();
    check(&Program { path: env!("CARGO_BIN_EXE_model-deepseekv2-legacy"), flags: &flags });
}

#[test]
fn the_text_the_routing_and_the_heat_are_those_of_one_rank() {
    with(&[], |program| program.generates_the_same());
    with(&["--moe-path", "fused", "--mla", "naive"], |program| program.generates_the_same());
}

#[test]
fn a_batch_over_data_parallel_ranks_is_that_of_one() {
    with(&[], |program| program.answers_the_same());
    with(&["--moe-path", "fused"], |program| program.answers_the_same());
}

#[test]
fn parity_holds_over_ranks() {
    with(&[], |program| program.compares_the_same("deepseek-v2"));
}

#[test]
fn sizes_that_ranks_cannot_cut_are_named_before_loading() {
    for path in ["legacy", "fused"] {
        with(&["--moe-path", path], |program| {
            program.refuses(&["--tp", "3"], &["the number of query heads 4 is not divisible by tp 3"]);
            // The intermediate size has two segments of 7, so two ranks can share it, or ranks can have whole experts.
            let words = ["the experts' intermediate size 14", "tp 4", "--enable-expert-parallel"];
            program.refuses(&["--tp", "4"], &words);
        });
    }
}
