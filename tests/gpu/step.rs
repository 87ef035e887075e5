//! The transfers of a step: page-locked words that a kernel or the copy engine copies, and tokens that the step before
//! has sampled.

use candle_core::DType;
use moe_kernels::Buffer;
use moe_kernels::cuda::{LastStep, StepTokens, upload_step_into};

use crate::common::{Rng, cuda, small};

fn words(rng: &mut Rng, len: usize) -> Vec<u32> {
    (0..len).map(|_| rng.bits() as u32).collect()
}

#[test]
fn words_of_any_number_travel_both_ways_and_nothing_behind_them() {
    let ex = cuda();
    let mut rng = Rng::new();
    // Lengths on both sides of the length from which the copy engine is used.
    let lens = [0, 1, 3, 255, 256, 257, 10_001, (1 << 16) - 1, 1 << 16, (1 << 16) + 1, 1 << 20];
    for len in small(lens, 1 << 17, |&len| len) {
        let sent = words(&mut rng, len + 5);
        let before = words(&mut rng, len + 9);
        let mut host = ex.pinned(len + 5).unwrap();
        host.wait().unwrap().copy_from_slice(&sent);
        let mut device = ex.zeros(DType::U32, &[len + 9]).unwrap();
        let filled = Buffer::from_vec(before.clone(), &[len + 9]).unwrap();
        ex.copy_from_host(filled.view(), device.view_mut()).unwrap();
        // This address is not a multiple of 16 bytes.
        ex.upload(&mut host, device.view_mut().narrow(1, len).unwrap()).unwrap();
        let mut back = ex.pinned(len + 9).unwrap();
        back.wait().unwrap().fill(7);
        ex.download(device.view().narrow(1, len).unwrap(), &mut back).unwrap();
        let got = ex.to_host(device.view()).unwrap();
        let want = [&before[..1], &sent[..len], &before[1 + len..]].concat();
        assert_eq!(got.view().cpu::<u32>().unwrap(), want, "{len} words to the device");
        let back = back.wait().unwrap();
        assert_eq!(back[..len], sent[..len], "{len} words back");
        assert_eq!(back[len..], [7; 9], "after {len} words");
    }
}

#[test]
fn words_that_page_locked_memory_has_no_room_for_are_refused() {
    let ex = cuda();
    let mut host = ex.pinned(4).unwrap();
    let mut device = ex.zeros(DType::U32, &[5]).unwrap();
    let error = ex.upload(&mut host, device.view_mut()).unwrap_err().to_string();
    assert!(error.contains("expected at most 4 words, got 5"), "{error}");
    let error = ex.download(device.view(), &mut host).unwrap_err().to_string();
    assert!(error.contains("expected at most 4 words, got 5"), "{error}");
    let sampled = ex.zeros(DType::U32, &[1]).unwrap();
    let tokens = StepTokens { ids: 4, source: 1, rows: 2 };
    let last = LastStep { sampled: sampled.view(), read_back: None };
    let error = upload_step_into(&mut host, last, tokens, device.view_mut(), &ex).unwrap_err();
    assert!(error.to_string().contains("are not within 5 words"), "{error}");
    let tokens = StepTokens { ids: 0, source: 0, rows: 0 };
    let mut back = ex.pinned(4).unwrap();
    let mut to = ex.zeros(DType::U32, &[4]).unwrap();
    let last = LastStep { sampled: sampled.view(), read_back: Some((&mut back, 2)) };
    let error = upload_step_into(&mut host, last, tokens, to.view_mut(), &ex).unwrap_err();
    assert!(error.to_string().contains("expected at most 1 words to read back, got 2"), "{error}");
    let sampled = ex.zeros(DType::U32, &[9]).unwrap();
    let last = LastStep { sampled: sampled.view(), read_back: Some((&mut back, 9)) };
    let error = upload_step_into(&mut host, last, tokens, to.view_mut(), &ex).unwrap_err();
    assert!(error.to_string().contains("expected at most 4 words, got 9"), "{error}");
}

#[test]
fn a_step_takes_the_tokens_that_the_one_before_sampled_and_reads_its_results_back() {
    let ex = cuda();
    let mut rng = Rng::new();
    // Rows, words after them, and words that are read back: fewer and more than the step has.
    let cases = [
        (0, 3, None),
        (1, 1, Some(2)),
        (4, 90, Some(0)),
        (255, 0, Some(40)),
        (0, 1, Some(9_001)),
        (300, 70_000, Some(600)),
        (1024, 2_600_001, Some(70_000)),
    ];
    for (rows, rest, results) in small(cases, 10_000, |x| x.1 + x.2.unwrap_or(0)) {
        let ids = 4 + rng.below(9);
        let source = 4 + 9 + rows + rng.below(9);
        let len = source + rows + rest;
        let sampled = words(&mut rng, 40.max(results.unwrap_or(0) + 3));
        let mut sent = words(&mut rng, len);
        for row in &mut sent[source..][..rows] {
            *row = if rng.bits().is_multiple_of(3) { u32::MAX } else { rng.below(40) as u32 };
        }
        let mut want = sent.clone();
        for row in 0..rows {
            if let Some(&token) = sampled.get(sent[source + row] as usize) {
                want[ids + row] = token;
            }
        }
        let mut host = ex.pinned(len).unwrap();
        host.wait().unwrap().copy_from_slice(&sent);
        let left = sampled.len();
        let of_before = Buffer::from_vec(sampled.clone(), &[left]).unwrap();
        let before = sampled;
        let mut sampled = ex.zeros(DType::U32, &[left]).unwrap();
        ex.copy_from_host(of_before.view(), sampled.view_mut()).unwrap();
        let mut device = ex.zeros(DType::U32, &[len]).unwrap();
        let tokens = StepTokens { ids, source, rows };
        let mut back = ex.pinned(results.unwrap_or(0) + 5).unwrap();
        back.wait().unwrap().fill(7);
        let read_back = results.map(|words| (&mut back, words));
        let last = LastStep { sampled: sampled.view(), read_back };
        upload_step_into(&mut host, last, tokens, device.view_mut(), &ex).unwrap();
        let back = back.wait().unwrap();
        let results = results.unwrap_or(0);
        assert!(back[..results] == before[..results], "{results} words back with {tokens:?}");
        assert_eq!(back[results..], [7; 5], "after {results} words");
        let got = ex.to_host(device.view()).unwrap();
        assert!(got.view().cpu::<u32>().unwrap() == want, "{tokens:?} in {len} words");
    }
}
