<?php
// SPDX-License-Identifier: Apache-2.0
// call_tree.php SIZE: a known call tree. Ten times down, each through array_map, which is C; there heavy,
// light and caught in the proportion 3 to 1 to 1. With methods, closures, generators and included code.

const DEPTH = 10;

function spin(int $n): int
{
    $x = $n | 1;
    for ($i = 0; $i < $n; $i++) {
        $x = ($x * 25173 + 13849) & 65535;
    }
    return $x;
}

function heavy(int $n): int
{
    return spin(3 * $n) ^ 1;
}

function light(int $n): int
{
    return spin($n) ^ 2;
}

function raise(): int
{
    throw new InvalidArgumentException();
}

function caught(int $n): int
{
    try {
        return raise();
    } catch (InvalidArgumentException) {
        return spin($n) ^ 3;
    }
}

function down(int $depth, int $n): int
{
    if ($depth > 0) {
        return array_sum(array_map(fn (int $it): int => down($it, $n), [$depth - 1]));
    }
    return heavy($n) + light($n) + caught($n);
}

class Tree
{
    public function __call(string $name, array $arguments): int
    {
        return down(0, ...$arguments);
    }

    public function method(int $n): int
    {
        return down(0, $n);
    }

    public static function generated(int $n): Generator
    {
        for ($i = 0; $i < 2; $i++) {
            yield down(0, $n);
        }
    }
}

function others(int $n): int
{
    $tree = new Tree();
    $sum = $tree->method($n) + $tree->absent($n) + call_user_func([$tree, 'method'], $n);
    foreach (Tree::generated($n) as $it) {
        $sum += $it;
    }
    $values = range($n >> 3, 1);
    usort($values, fn (int $a, int $b): int => $a <=> $b);
    return $sum + count($values) + preg_match('/(a+)+$/', str_repeat('a', 20));
}

function work(int $n): void
{
    for (;;) {
        down(DEPTH, $n);
        others($n);
    }
}

echo "ready\n";
work((int) $argv[1]);
