#!/usr/bin/env bash
# Make diffs anew after ppo.py or dpo.py has changed, so that they apply again without fuzz:
#
#   bash ablations/refresh.sh [NAME...]     # without names, all
#
# The old diff names the blob it was made from. Its script is made from that, and the change since then is merged into it.
# Where both meet, the script stays in the root with conflict markers: mend it, then run this again with the same name. A
# script of that name that this did not leave there is an error.
set -euo pipefail
CDPATH= cd "$(dirname "${BASH_SOURCE[0]}")/.."

(($#)) || set -- $(basename -s .diff ablations/*.diff)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0
for name; do
    diff=ablations/$name.diff
    read -r source target < <(sed -n 's|^diff --git a/\(.*\) b/\(.*\)$|\1 \2|p' "$diff")
    made=$work/$name/$target
    mark=$(git rev-parse --git-path "refresh-$name") # if this left $target in the root: the blob that it goes with
    blob=$(sed -n 's/^index \([0-9a-f]*\)\..*/\1/p' "$diff")
    mkdir -p "$work/$name"
    if ! git show "$blob" > "$work/$name/$source" 2> /dev/null; then
        echo "error: this clone does not have the $source that $diff was made from (a shallow clone?): git fetch --unshallow" >&2
        exit 1
    fi
    (cd "$work/$name" && git apply - < "$OLDPWD/$diff")
    if [[ ! -e $target ]]; then
        rm -f "$mark"
    elif [[ ! -e $mark ]] || cmp -s "$made" "$target"; then
        echo "error: $target is in the root, and this script did not leave it there: move it away, then run this again" >&2
        exit 1
    elif grep -q '^<<<<<<< ' "$target"; then
        echo "error: $target still has conflict markers: mend it, or delete it to start again" >&2
        exit 1
    else # mended by hand
        git show "$(< "$mark")" > "$work/$name/$source"
        cp "$target" "$made"
    fi
    now=$(git hash-object -w "$source") # for the next time, even if this state is never committed
    if ! git merge-file -L "$target" -L "old $source" -L "$source" "$made" "$work/$name/$source" "$source"; then
        cp "$made" "$target"
        echo "$now" > "$mark"
        echo "$name: $source has changed where the diff changes it: mend $target, then bash ablations/refresh.sh $name" >&2
        failed=1
        continue
    fi
    # a repository of its own, so that nothing but these two files can look like the source of the copy
    rm -rf "$work/repository"
    git init -q "$work/repository"
    cp "$source" "$work/repository"
    git -C "$work/repository" add "$source"
    cp "$made" "$work/repository"
    git -C "$work/repository" add -N "$target"
    {
        sed '/^diff --git /,$d' "$diff"
        git -C "$work/repository" -c diff.noprefix=false -c diff.mnemonicPrefix=false diff --no-color --no-ext-diff \
            -C --find-copies-harder --full-index
    } > "$work/$name.diff"
    if cmp -s "$diff" "$work/$name.diff"; then
        echo "$name: unchanged"
    else
        cp "$work/$name.diff" "$diff"
        echo "$name: made anew"
    fi
    [[ ! -e $mark ]] || rm "$target" "$mark"
done
exit $failed
