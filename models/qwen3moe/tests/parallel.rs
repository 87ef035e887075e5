//! Ranks and chunks on the command line: the same text, routing and heat, and clear refusals.
#![allow(clippy::unwrap_used)] // helpers of tests are not tests in clippy's eyes

#[path = "../../../tests/cli/program.rs"]
mod program;
#[path = "../../../tests/cli/ranks.rs"]
mod ranks;

use program::Program;

/// The program with its embedded model.
const PROGRAM: Program = Program { path: env!("CARGO_BIN_EXE_model-qwen3moe"), flags: &[] };

fn fails(args: &[&str], words: &[&str]) {
    PROGRAM.refuses(args, words);
}

#[test]
fn the_text_the_routing_and_the_heat_are_those_of_one_rank() {
    PROGRAM.generates_the_same();
}

#[test]
fn a_batch_over_data_parallel_ranks_is_that_of_one() {
    PROGRAM.answers_the_same();
}

#[test]
fn parity_holds_over_tensor_parallel_ranks() {
    PROGRAM.compares_the_same("base");
}

#[test]
fn contradictions_say_what_to_change() {
    fails(&["--tp", "0"], &["tp must be at least 1"]);
    fails(&["--dp", "0"], &["dp must be at least 1"]);
    fails(
        &["--tp", "3"],
        &["the number of query heads 8 is not divisible by tp 3", "choose a tp that divides it"],
    );
    fails(&["--tp", "16"], &["query heads 8 is not divisible by tp 16"]);
    fails(&["--tp", "2", "--moe-ep-backend", "warp"], &["unknown MoE backend \"warp\"", "local_allreduce"]);
    fails(&["--tp", "2", "--moe-ep-backend", "deepep"], &["add --enable-expert-parallel"]);
    fails(
        &["--tp", "2", "--enable-expert-parallel", "--moe-ep-backend", "off"],
        &["drop --enable-expert-parallel"],
    );
    fails(
        &["--dp", "2", "--enable-expert-parallel", "--moe-ep-backend", "tp_ep"],
        &["dp must be 1, got 2", "allgather_reducescatter or deepep"],
    );
    fails(&["--tp", "2", "--deepep-mode", "low_latency"], &["has no effect on the MoE backend disabled"]);
    fails(
        &["--dp", "2", "--enable-expert-parallel", "--deepep-mode", "fast"],
        &["unknown DeepEP mode \"fast\""],
    );
    fails(&["--expert-placement-strategy", "random"], &["unknown expert placement", "linear, round_robin"]);
    fails(&["--enable-eplb"], &["--enable-eplb needs experts spread over at least two ranks"]);
    fails(&["--tp", "2", "--num-redundant-experts", "4"], &["--num-redundant-experts needs", "--tp or --dp"]);
    fails(
        &["--tp", "2", "--enable-expert-parallel", "--num-redundant-experts", "99"],
        &["--num-redundant-experts: 99 redundant", "at most 16"],
    );
    fails(&["--eplb-window", "4"], &["--enable-eplb"]);
    let ep = ["--tp", "2", "--enable-expert-parallel", "--enable-eplb"];
    fails(&[&ep[..], &["--eplb-interval", "0"]].concat(), &["--eplb-interval 0: expected 1 to"]);
    fails(&[&ep[..], &["--eplb-policy", "luck"]].concat(), &["unknown policy \"luck\"", "joint, flashlb"]);
    fails(
        &[&ep[..], &["--num-redundant-experts", "1"]].concat(),
        &["16 experts and 1 redundant", "experts 2"],
    );
    fails(
        &[&ep[..], &["--expert-placement-strategy", "round_robin"]].concat(),
        &["drop --expert-placement-strategy round_robin"],
    );
    fails(&["--chunked-moe-size", "4"], &["--enable-chunked-moe"]);
    fails(&["--moe-memory-budget", "4MiB"], &["--enable-chunked-moe"]);
    fails(&["--enable-chunked-moe", "--chunked-moe-size", "0"], &["0"]);
    let both = ["--enable-chunked-moe", "--chunked-moe-size", "4", "--moe-memory-budget", "1MiB"];
    fails(&both, &["cannot be used with"]);
}

#[test]
fn a_budget_below_one_token_is_refused() {
    let small = PROGRAM.run(&["--prompt", "x", "--enable-chunked-moe", "--moe-memory-budget", "100"]);
    let stderr = String::from_utf8(small.stderr).unwrap();
    assert_eq!(small.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("the MoE memory budget of 100 bytes is too small: one token needs"), "{stderr}");
}
